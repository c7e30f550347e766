"""The style sheet of the report page. Text, because the page must stand alone in one file."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #1c1d21; --muted: #646974; --rule: #e3e4e0; --accent: #2b63c4;
  --good: #1b7a43; --good-bg: #e3f3e8; --bad: #b3261e; --bad-bg: #fbe6e3; --warn: #8a5a00; --warn-bg: #fdf0d5; --none-bg: #eeeeec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #141518; --card: #1b1d21; --ink: #e8e9ec; --muted: #9da2ad; --rule: #30333a; --accent: #82aaff;
    --good: #6fd396; --good-bg: #16301f; --bad: #ff8f85; --bad-bg: #3a1a18; --warn: #f0be62; --warn-bg: #362a12; --none-bg: #26282d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { border-bottom: 1px solid var(--rule); padding-bottom: 1.5rem; }
.kicker { margin: 0; color: var(--muted); font-size: .875rem; }
h1 { margin: .15rem 0 1rem; font-size: clamp(1.5rem, 3.5vw, 2.1rem); line-height: 1.2; font-weight: 650; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .75rem; font-size: 1.2rem; font-weight: 650; letter-spacing: -.005em; }
h3 { margin: 1.5rem 0 .5rem; font-size: .95rem; font-weight: 600; }
.verdict { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; margin: 0; font-size: 1.05rem; }
.verdict .badge { font-size: 1.25rem; padding: .2rem .8rem; }
.open { margin: .75rem 0 0; padding-left: 1.1rem; }
a { color: var(--accent); }
.badge { display: inline-block; justify-self: start;
  padding: .05rem .5rem; border-radius: .4rem; font-size: .8rem; font-weight: 650; line-height: 1.5;
  background: var(--none-bg); color: var(--muted); white-space: nowrap; }
.badge.pass { background: var(--good-bg); color: var(--good); }
.badge.fail, .badge.regression { background: var(--bad-bg); color: var(--bad); }
.badge.inconclusive { background: var(--warn-bg); color: var(--warn); }
.tile { margin: 0; }
.tile dt { color: var(--muted); font-size: .85rem; }
.tile .pair { white-space: nowrap; }
dd { margin: 0; }
.tile .number { font-size: 1.3rem; font-weight: 600; line-height: 1.35; letter-spacing: -.02em;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.tile .note { color: var(--muted); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 2rem 2.5rem; }
figure { margin: 0; }
figcaption { margin-bottom: .4rem; font-weight: 600; font-size: .95rem; }
figcaption span { display: block; font-weight: 400; color: var(--muted); font-size: .875rem; }
svg { display: block; width: 100%; height: auto; font-family: inherit; overflow: visible; }
.check { border-top: 1px solid var(--rule); }
.check:last-child { border-bottom: 1px solid var(--rule); }
.check summary { display: grid; grid-template-columns: 7.5rem 1fr; gap: .5rem; padding: .6rem 0; cursor: pointer; align-items: start;
  list-style: none; }
.check summary::-webkit-details-marker { display: none; }
.check summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.check summary:hover strong { color: var(--accent); }
.what strong { display: block; font-weight: 550; }
.what span { display: block; color: var(--muted); font-size: .92rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.evidence { margin: 0 0 1rem 8rem; font-size: .9rem; }
.limit { margin: 0 0 .5rem; color: var(--muted); }
code, pre, td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85em; }
code { background: var(--none-bg); border-radius: .3rem; padding: .1rem .35rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .15rem 1.25rem; margin: 0;
  font-variant-numeric: tabular-nums; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1.5rem; margin-top: 1.75rem; }
.evidence dt, .facts dt { color: var(--muted); }
.pair { white-space: nowrap; }
dd { margin: 0; overflow-wrap: anywhere; }
.evidence ul { margin: .75rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--muted); font-weight: 550; }
.count { text-align: right; }
td.hash { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .78rem; overflow-wrap: anywhere; }
pre { overflow: auto; max-height: 28rem; margin: .5rem 0; padding: .9rem 1rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: .5rem; line-height: 1.45; }
.more > summary { cursor: pointer; color: var(--accent); padding: .35rem 0; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--rule); color: var(--muted); font-size: .85rem; }
@media (max-width: 40rem) {
  main { padding-top: 1.5rem; }
  .check summary { grid-template-columns: 1fr; gap: .25rem; }
  .evidence { margin-left: 0; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dl dt { margin-top: .4rem; }
}
@media print { body { background: #fff; } .check, figure { break-inside: avoid; } pre { max-height: none; } }
""".strip()
