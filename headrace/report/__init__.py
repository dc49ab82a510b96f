"""Write the report: one self-contained page about a run, or about several side by side.

It is made from the files that a run leaves behind and from nothing else, so it can be written again
at any time and gives the same bytes. The page needs no network, no script and no font of its own:
charts are inline SVG coloured by the page's style sheet, bars are HTML, and
a content security policy forbids the rest. What was not measured is said so, never shown as 0.
"""
