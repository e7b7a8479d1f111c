"""Colours: one per method, told apart by colour-blind readers, on light and on dark paper; never alone in telling."""

from __future__ import annotations

# Okabe and Ito's palette without its yellow, which vanishes on white, and with a brown; (on light, on dark).
# Source: https://jfly.uni-koeln.de/color/
_COLOURS = {
    "base": ("#555555", "#b5b5b5"),
    "full": ("#d55e00", "#f27a2a"),
    "lora": ("#d99000", "#f0b429"),
    "freeze": ("#bf5f95", "#dd8fbd"),
    "llama-pro": ("#7a4a1e", "#c9a27e"),
    "preserve": ("#3a9bd9", "#74c3f0"),
    "adapt": ("#00866a", "#2fbf9b"),
    "route": ("#0063a8", "#4a9ff0"),
    "ink": ("#1b1b1b", "#ececec"),
    "muted": ("#5f5f5f", "#a8a8a8"),
    "grid": ("#e2e2e2", "#353535"),
    "axis": ("#8a8a8a", "#7a7a7a"),
    "paper": ("#ffffff", "#141414"),
}
# Shapes are the second code, for print without colour.
MARKERS = {
    "base": "circle",
    "full": "circle",
    "lora": "square",
    "freeze": "up",
    "llama-pro": "diamond",
    "preserve": "down",
    "adapt": "cross",
    "route": "star",
}
_LIGHT, _DARK = 0, 1
_FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", "Noto Sans KR", '
    '"Noto Sans CJK KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif'
)
_FIGURE_RULES = f"""
svg.figure text {{ font-family: {_FONT}; }}
svg.figure .halo {{ paint-order: stroke; stroke-width: 3px; stroke-linejoin: round; }}
svg.figure .strong {{ font-weight: 600; }}
"""


def _colour_rules(shade: int) -> str:
    """Return a rule for filling and one for stroking with each colour; plain ones, which every SVG editor reads."""
    rules = [
        f"svg.figure .f-{name} {{ fill: {shades[shade]}; }} svg.figure .s-{name} {{ stroke: {shades[shade]}; }}"
        for name, shades in _COLOURS.items()
    ]
    return "\n".join(rules)


def light_colour(name: str) -> str:
    """Return a colour, as #rrggbb, for a figure on white paper."""
    return _COLOURS[name][_LIGHT]


def figure_style() -> str:
    """Return the style of a figure that stands alone: on light paper."""
    return _FIGURE_RULES + _colour_rules(_LIGHT)


def page_style() -> str:
    """Return the style of the page and its figures: light or dark as the reader has it, light in print."""
    light, dark = (
        "".join(f"--{name}: {_COLOURS[name][shade]};" for name in ("ink", "muted", "grid", "axis", "paper", "route"))
        for shade in (_LIGHT, _DARK)
    )
    return f"""
:root {{ color-scheme: light dark; {light} }}
{figure_style()}
@media screen and (prefers-color-scheme: dark) {{
:root {{ {dark} }}
{_colour_rules(_DARK)}
}}
{_PAGE_RULES}"""


_PAGE_RULES = f"""
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 {_FONT}; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ font-size: 1.75rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }}
h2 {{ font-size: 1.2rem; line-height: 1.3; margin: 48px 0 8px; }}
h3 {{ font-size: 1rem; margin: 24px 0 4px; }}
p {{ max-width: 78ch; margin: 8px 0; overflow-wrap: anywhere; }}
p.lead {{ color: var(--muted); }}
.caption {{ font-size: 0.875rem; color: var(--muted); max-width: 92ch; }}
.caption b {{ color: var(--ink); }}
ul {{ max-width: 92ch; padding-left: 1.2em; overflow-wrap: anywhere; }}
li {{ font-size: 0.875rem; }}
figure {{ margin: 12px 0 0; }}
svg.figure {{ display: block; width: 100%; height: auto; }}
svg.wide {{ max-width: 960px; }}
svg.narrow {{ display: none; max-width: 480px; }}
svg.swatch {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
.scroll {{ overflow-x: auto; margin: 12px 0; }}
table {{ border-collapse: collapse; font-size: 0.875rem; line-height: 1.35; font-variant-numeric: tabular-nums; }}
table.wide {{ width: 100%; }}
th, td {{ padding: 6px 10px; text-align: right; vertical-align: top; }}
th {{ font-weight: 600; vertical-align: bottom; }}
th:first-child, td.name {{ text-align: left; }}
td.word, th.word {{ text-align: left; }}
td.name {{ min-width: 8.5em; max-width: 22em; overflow-wrap: anywhere; }}
thead {{ border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink); }}
tbody {{ border-bottom: 1px solid var(--grid); }}
tbody:last-of-type {{ border-bottom: 2px solid var(--ink); }}
small {{ display: block; font-size: 0.75rem; color: var(--muted); font-weight: 400; white-space: nowrap; }}
td.name small, th small {{ white-space: normal; }}
td.best {{ font-weight: 700; }}
td.whole {{ white-space: nowrap; }}
@media screen and (max-width: 719px) {{
  main {{ padding: 20px 16px 48px; }}
  h1 {{ font-size: 1.4rem; }}
  svg.wide {{ display: none; }}
  svg.narrow {{ display: block; margin: 0 auto; }}
  .scroll {{ margin-right: -16px; padding-right: 16px; }}
  .scroll th:first-child, .scroll td.name {{ position: sticky; left: 0; background: var(--paper); }}
  td.name {{ min-width: 7.5em; max-width: 8.5em; }}
  th, td {{ padding: 6px; }}
}}
@media print {{
  @page {{ margin: 14mm; }}
  body {{ font-size: 10pt; background: none; }}
  main {{ max-width: none; padding: 0; }}
  h2 {{ margin-top: 20pt; break-after: avoid; }}
  table {{ font-size: 7.5pt; }}
  th, td {{ padding: 3pt 4pt; }}
  td.name {{ min-width: 0; }}
  small {{ font-size: 6.5pt; }}
  .scroll {{ overflow: visible; }}
  figure, tr, li, table.wide tbody {{ break-inside: avoid; }}
  h3 {{ break-after: avoid; }}
  .caption, li {{ font-size: 8.5pt; }}
}}
"""
