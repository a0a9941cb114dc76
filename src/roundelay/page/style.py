"""The pages' CSS, and the script that shows values at the cursor. Neither fetches anything."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #22262b; --soft: #667079; --line: #e4e5e7; --bubble: #eceded;
  --forward: #6b9ac4; --backward: #e2ac5f; --update: #7aa874; --data: #a596c7; --wait: #cf7468;
  --inside: #1c2024; --a: #3f76a8; --b: #cf7468; --c: #55915a; --thin: #a9c1d8;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e4e6e8; --soft: #9aa3ab; --line: #30363c; --bubble: #2d3339;
    --forward: #6495c4; --backward: #d3a15a; --update: #76a471; --data: #9a8cc0; --wait: #d27a6e;
    --inside: #101315; --a: #7fb2e0; --b: #e08a7e; --c: #86c08a; --thin: #4c6a85;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 56px; }
header { margin-bottom: 22px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; font-weight: 650; }
h3 { font-size: 14px; margin: 14px 0 6px; font-weight: 600; }
p { margin: 0 0 10px; color: var(--soft); max-width: 78ch; }
.state {
  display: inline-block; vertical-align: 4px; margin-left: 10px; padding: 1px 10px; border-radius: 99px;
  font-size: 13px; font-weight: 600; border: 1px solid currentColor;
}
.state.done { color: var(--c); }
.state.open { color: var(--b); }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-bottom: 16px;
}
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px 20px; margin: 0; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 18px 26px; }
.many { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 18px 26px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 8px; padding: 0; list-style: none; }
.legend li { font-size: 13px; color: var(--soft); display: flex; align-items: center; gap: 6px; }
.legend i { width: 12px; height: 12px; border-radius: 3px; display: inline-block; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg text.tick { fill: var(--soft); }
svg text.inside { fill: var(--inside); pointer-events: none; }
svg text.inside.bubble, svg text.inside.thin { fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; opacity: .6; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.curve.thin { stroke: var(--thin); stroke-width: 1.2; }
.curve.a { stroke: var(--a); } .curve.b { stroke: var(--b); } .curve.c { stroke: var(--c); }
.curve.d { stroke: var(--data); }
.dot { stroke: var(--card); stroke-width: 1; }
.dot.a { fill: var(--a); } .dot.b { fill: var(--b); } .dot.c { fill: var(--c); } .dot.d { fill: var(--data); }
.dot.thin { fill: var(--thin); }
rect.forward, i.forward { fill: var(--forward); background: var(--forward); }
rect.backward, i.backward { fill: var(--backward); background: var(--backward); }
rect.update, i.update { fill: var(--update); background: var(--update); }
rect.data, i.data { fill: var(--data); background: var(--data); }
rect.bubble, i.bubble { fill: var(--bubble); background: var(--bubble); }
rect.wait, i.wait { fill: var(--wait); background: var(--wait); }
rect.other, i.other { fill: var(--soft); background: var(--soft); }
rect.thin, i.thin { fill: var(--thin); background: var(--thin); }
i.a { background: var(--a); } i.b { background: var(--b); } i.c { background: var(--c); }
i.d { background: var(--data); }
i.bubble { border: 1px solid var(--line); }
.cursor line { stroke: var(--soft); stroke-dasharray: 3 3; }
.cursor circle { fill: var(--ink); }
.cursor rect { fill: var(--card); stroke: var(--line); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 12px; }
th, td { text-align: right; padding: 5px 0 5px 18px; border-top: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); border-top: 0; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { margin: 10px 0 0; font: 12.5px/1.5 ui-monospace, monospace; overflow-x: auto; }
summary { cursor: pointer; font-weight: 650; font-size: 17px; }
footer { color: var(--soft); font-size: 13px; }
.middle, .narrow { display: none; }
@media (max-width: 980px) {
  .wide { display: none; }
  .middle { display: block; }
}
@media (max-width: 620px) {
  .middle { display: none; }
  .narrow { display: block; }
  main { padding: 18px 10px 40px; }
  section { padding: 14px 12px; }
  h1 { font-size: 21px; }
}
@media print {
  * { print-color-adjust: exact; }
  section { break-inside: avoid; }
  .scroll { overflow: visible; }
  .wide { display: block; }
  .middle, .narrow { display: none; }
}
"""

SCRIPT = """
for (const svg of document.querySelectorAll('svg.plot')) {
  const [xl, xh, xs, xe] = svg.dataset.x.split(',').map(Number);
  const [yl, yh, ys, ye, log] = svg.dataset.y.split(',').map(Number);
  const lines = [...svg.querySelectorAll('path.curve')].map(path => [path.dataset.name,
    path.getAttribute('d').split(/[ML]/).filter(Boolean).map(pair => pair.split(' ').map(Number))]);
  const make = (name, parent) => parent.appendChild(document.createElementNS(svg.namespaceURI, name));
  const set = (node, values) => { for (const key in values) node.setAttribute(key, values[key]); };
  const value = y => { const s = (y - ys) / (ye - ys); return log ? yl * Math.pow(yh / yl, s) : yl + s * (yh - yl); };
  const box = svg.viewBox.baseVal;
  let cursor = null;
  const leave = () => { if (cursor) cursor.remove(); cursor = null; };
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('pointermove', event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    leave();
    if (at < xs || at > xe) return;
    cursor = make('g', svg);
    set(cursor, {class: 'cursor', 'pointer-events': 'none'});
    set(make('line', cursor), {x1: at, x2: at, y1: ye, y2: ys});
    const texts = [svg.dataset.name + ' ' + Number((xl + (at - xs) / (xe - xs) * (xh - xl)).toPrecision(4))];
    for (const [name, points] of lines) {
      if (!points.length) continue;
      const near = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      set(make('circle', cursor), {cx: near[0], cy: near[1], r: 3});
      texts.push(name + ' ' + Number(value(near[1]).toPrecision(4)));
    }
    const wide = 7 * Math.max(...texts.map(text => text.length)) + 14;
    const left = at + 12 + wide > box.width ? at - 12 - wide : at + 12;
    set(make('rect', cursor), {x: left, y: ye, width: wide, height: 16 * texts.length + 8, rx: 5});
    texts.forEach((text, i) => {
      const line = make('text', cursor);
      set(line, {x: left + 7, y: ye + 17 + 16 * i});
      line.textContent = text;
    });
  });
}
"""
