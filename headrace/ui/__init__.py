"""Show a folder of runs in a browser on this machine: `headrace ui`.

The pages are made by `headrace/report`, from the files that runs leave, whenever they are asked
for. So a page never disagrees with `report.html`, and a run that goes on is shown as far as it has
come. The server is Starlette on uvicorn. It listens on a loopback address alone, and answers only
requests that name such an address as their host, so that no page of another site reaches it by a
name of its own (DNS rebinding). It reads, and nothing else: what stops a run needs the token that
`--token` makes. What a file says is escaped, what lies outside the folder is refused, and a page
holds no script but the one file that the server sends beside it.
"""
