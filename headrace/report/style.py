"""The page's style sheet: system fonts, two palettes, nothing that moves.

Colours of data are `--c0` to `--c7` and carry 3:1 or better against the page in both schemes; text
colours carry 4.5:1 or better (WCAG 2.2 AA). Wide content scrolls in its own box, so that the page
itself never scrolls sideways on a phone.
"""

DATA_COLOURS = tuple(f"c{number}" for number in range(8))
"""Names of the colours of data, as `report.page` takes them."""
STYLE = """
:root{--page:#f7f8f9;--card:#fff;--ink:#17212b;--soft:#566370;--rule:#dfe4e8;--grid:#e8ecef;
--goal:#17212b;--good:#17694b;--good-bg:#e2f2ea;--bad:#a33420;--bad-bg:#fae8e3;--plain:#4a5763;
--plain-bg:#e9edf0;--c0:#1b6ca8;--c1:#c8553d;--c2:#2e8b6f;--c3:#8a5fb0;--c4:#a97a0a;--c5:#2388a6;
--c6:#a8486f;--c7:#77838f}
@media(prefers-color-scheme:dark){:root{--page:#10161c;--card:#182028;--ink:#e6ebef;--soft:#9eabb7;
--rule:#2b3640;--grid:#25303a;--goal:#e6ebef;--good:#7fd6ae;--good-bg:#17352a;--bad:#f5a18c;
--bad-bg:#41211a;--plain:#b9c4ce;--plain-bg:#27323c;--c0:#69b1ea;--c1:#f08a70;--c2:#5fc3a0;
--c3:#b994de;--c4:#dfb44a;--c5:#74cbe2;--c6:#db8cad;--c7:#8794a1}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,footer{max-width:1120px;margin:0 auto;padding:0 20px}
header{padding:44px 0 8px}
.eyebrow{margin:0;color:var(--soft);font-size:13px;letter-spacing:.08em;text-transform:uppercase}
h1{margin:2px 0 12px;font-size:clamp(28px,5vw,40px);line-height:1.15;letter-spacing:-.02em;
font-weight:650;overflow-wrap:anywhere}
h2{margin:0 0 14px;font-size:19px;line-height:1.3;letter-spacing:-.005em;font-weight:650}
h3{margin:20px 0 8px;font-size:15px;font-weight:650}
p{margin:0 0 12px;max-width:90ch;overflow-wrap:anywhere}
.verdict{font-size:clamp(17px,2.2vw,20px);line-height:1.5;margin:0 0 8px;max-width:68ch}
.badge{display:inline-block;padding:1px 11px;margin:0 0 10px;border-radius:99px;font-size:14px;
font-weight:600;white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}.bad{color:var(--bad);background:var(--bad-bg)}
.plain{color:var(--plain);background:var(--plain-bg)}
.muted,figcaption,.note{color:var(--soft);font-size:14px}
section{margin:20px 0;padding:22px 24px;background:var(--card);border:1px solid var(--rule);
border-radius:12px}
section>:last-child{margin-bottom:0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:1px;margin:0;
padding:0}
.cards div{padding:10px 16px 12px 0}
.cards dt{color:var(--soft);font-size:14px}
.cards dd{margin:0;font-size:25px;line-height:1.25;font-weight:600;letter-spacing:-.015em;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.cards .absent{color:var(--soft);font-size:17px;font-weight:400;letter-spacing:0}
.cards .note{margin-top:3px;font-size:13px;line-height:1.4;font-weight:400;letter-spacing:0}
.narrow{box-shadow:inset 4px 0 0 var(--c0)}
.narrow .lead{font-size:18px;margin-bottom:6px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
gap:20px 28px}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto;overflow:visible}
figcaption{margin-bottom:6px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 8px;padding:0;list-style:none;
color:var(--ink);font-size:14px;overflow-wrap:anywhere}
.swatch{display:inline-block;width:12px;height:12px;margin-right:7px;border-radius:3px;
background:var(--at);vertical-align:-1px}
.swatch.line,.swatch.dash{width:20px;height:0;border-radius:0;background:none;
border-top:3px solid var(--at);vertical-align:4px}
.swatch.dash{border-top-style:dashed;border-top-width:2px}
.stack{display:flex;height:30px;min-width:2px;margin:4px 0 14px;border-radius:6px;overflow:hidden;
background:var(--grid)}
.stack span{display:block;min-width:0;border-right:1px solid var(--card)}
.bar{height:8px;min-width:90px;border-radius:4px;background:var(--grid);overflow:hidden}
.bar+.bar{margin-top:3px}
.bar span{display:block;height:100%;border-radius:4px}
.scroll{overflow-x:auto;margin:0 0 12px;-webkit-overflow-scrolling:touch}
.scroll:focus-visible,summary:focus-visible,pre:focus-visible{outline:2px solid var(--c0);
outline-offset:3px}
table{width:100%;border-collapse:collapse;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:8px 18px 8px 0;border-bottom:1px solid var(--rule);text-align:left;
vertical-align:top}
tbody tr:last-child>*{border-bottom:0}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-size:13px;font-weight:500;vertical-align:bottom}
tbody th{font-weight:500}
td,th code{overflow-wrap:anywhere}.wide td{overflow-wrap:break-word}
td p,th p{margin:0;font-weight:400}td .badge,tbody th .badge,section>p>.badge{margin:0}
.mark{white-space:nowrap}.charts+p{margin-top:12px}
.number{text-align:right;white-space:nowrap;overflow-wrap:normal}
.ratio{display:inline-block;min-width:6ch;color:var(--soft);font-size:13px}
pre{margin:0 0 12px;padding:14px 16px;overflow-x:auto;background:var(--page);
border:1px solid var(--rule);border-radius:8px;
font:13.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.command{white-space:pre-wrap;overflow-wrap:anywhere;user-select:all}
.sample{white-space:pre-wrap;overflow-wrap:anywhere}
.sample b{font-weight:700}
summary{cursor:pointer;font-weight:500}
details pre{margin-top:12px}
footer{padding:8px 20px 48px;color:var(--soft);font-size:13px}
@media(max-width:640px){main,footer{padding-left:14px;padding-right:14px}header{padding-top:26px}
section{margin:14px 0;padding:18px 15px}.cards{grid-template-columns:1fr 1fr}
.cards dd{font-size:21px}.cards .note{font-size:13px}
table{font-size:13.5px}th,td{padding-right:8px}.bar{min-width:34px}
.swatch{margin-right:5px}.wide{min-width:480px}thead .number{white-space:normal}
tbody th:has(code){min-width:150px}}
@media print{body{background:#fff}section{break-inside:avoid;border-color:#ccc}}
"""
