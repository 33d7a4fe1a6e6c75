"""The style sheet of the report: light, dark (by the reader's own setting) and print, without a network."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1f2937; --faint: #6b7280; --grid: #e5e7eb; --band: #f3f4f6; --line: #1d4ed8;
  --old: #f59e0b; --bad: #b91c1c; --good: #15803d; --world: #93c5fd;
  --p1: #fca5a5; --p2: #fdba74; --p3: #fde68a; --p4: #a5d8f3; --p5: #a7f3d0; --on: #1f2937;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f172a; --ink: #e5e7eb; --faint: #94a3b8; --grid: #273449; --band: #172033; --line: #7dabff;
    --old: #fbbf24; --bad: #f87171; --good: #4ade80; --world: #2f5c9e;
  }
}
@media print { :root { --paper: #ffffff; --ink: #000000; --faint: #444444; } main { max-width: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 34px 0 8px; }
p { margin: 6px 0; } .faint { color: var(--faint); } .bad { color: var(--bad); } .good { color: var(--good); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; padding: 0; list-style: none; }
.tiles li { border: 1px solid var(--grid); border-radius: 8px; padding: 8px 14px; min-width: 120px; }
.tiles b { display: block; font-size: 19px; } .tiles span { color: var(--faint); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--faint); font-weight: 500; } td.wide { width: 45%; } .scroll { overflow-x: auto; }
pre { background: var(--band); padding: 12px; overflow: auto; font-size: 13px; border-radius: 8px;
  white-space: pre-wrap; }
section, svg, tr { break-inside: avoid; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg polyline, svg path { fill: none; } .label { fill: var(--faint); } .grid { stroke: var(--grid); }
.axis { stroke: var(--faint); } .loss { stroke: var(--line); stroke-width: 1.6; stroke-linejoin: round; }
.rate { stroke: var(--line); stroke-width: 1.2; }
.abandoned { stroke: var(--old); stroke-width: 1.4; stroke-dasharray: 4 3; }
.band.b0 { fill: none; } .band.b1 { fill: var(--band); } .world { fill: var(--world); }
.failure { stroke: var(--bad); stroke-dasharray: 4 3; } .planned { stroke: var(--good); stroke-dasharray: 4 3; }
.detected, .o1 { fill: var(--p1); } .decided, .o2 { fill: var(--p2); } .rebuilt, .o3 { fill: var(--p3); }
.restored, .o4 { fill: var(--p4); } .first_step, .o0 { fill: var(--p5); }
.o5 { fill: #d8b4fe; } .o6 { fill: #f9a8d4; } .o7 { fill: #cbd5e1; } .inside { fill: var(--on); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px 0 14px;
  vertical-align: -1px; }
"""
