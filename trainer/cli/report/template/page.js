"use strict";
// Tooltips with values, and unfolding of all details for printing. The page works without this script.
const NS = "http://www.w3.org/2000/svg";
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });

function format(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  return size && (size < 1e-3 || size >= 1e9) ? value.toExponential(2) : number.format(value);
}

function nearest(steps, wanted, holds) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= wanted) low = middle; else high = middle;
  }
  return !holds && wanted - steps[low] > steps[high] - wanted ? high : steps[high] <= wanted ? high : low;
}

function follow(plot) {
  const svg = plot.querySelector("svg"), source = plot.querySelector("script");
  if (!svg || !source) return;
  const data = JSON.parse(source.textContent), [left, top, width, height] = data.box;
  const [x0, x1] = data.x, scale = data.log ? Math.log : (value) => value, [y0, y1] = (data.y || []).map(scale);
  let cursor = null, tip = null, points = [];

  function leave() {
    for (const part of [cursor, tip, ...points]) if (part) part.remove();
    cursor = tip = null;
    points = [];
  }

  function shape(kind, attributes) {
    const made = document.createElementNS(NS, kind);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    return svg.appendChild(made);
  }

  function move(event) {
    const frame = svg.getBoundingClientRect(), unit = frame.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - frame.left) / unit;
    if (at < left - 8 || at > left + width + 8) return leave();
    const wanted = x0 + (at - left) / width * (x1 - x0);
    if (data.map) return look((wanted - data.map.from) / data.map.width, (event.clientY - frame.top) / unit, at * unit);
    const found = [];
    for (const line of data.lines) {
      if (!line.x.length) continue;
      const index = nearest(line.x, wanted, line.steps);
      found.push({ line, step: line.x[index], value: line.y[index] });
    }
    leave();
    if (!found.length) return;
    const step = found.reduce((a, b) => Math.abs(b.step - wanted) < Math.abs(a.step - wanted) ? b : a).step;
    const x = left + (step - x0) / (x1 - x0) * width;
    cursor = shape("line", { class: "cursor", x1: x, x2: x, y1: top, y2: top + height });
    begin(step);
    const shown = found.filter((each) => each.line.color >= 0 || found.length <= 8).slice(0, 8);
    for (const each of shown) {
      const color = each.line.color < 0 ? "var(--pale)" : `var(--s${each.line.color % 8})`;
      if (each.value !== null) {
        const y = top + (y1 - scale(each.value)) / (y1 - y0) * height;
        if (y >= top - 1 && y <= top + height + 1) {
          const px = left + ((each.line.steps ? step : each.step) - x0) / (x1 - x0) * width;
          const dot = shape("circle", { class: "point", cx: px, cy: y, r: 3.5 });
          dot.style.fill = color;
          points.push(dot);
        }
      }
      addRow(each.line.name, format(each.value), color);
    }
    place(x * unit);
  }

  function look(column, y, there) {
    const names = data.map.names, row = Math.floor((y - top) / height * names.length);
    leave();
    const values = data.map.values[row], found = values && values[Math.floor(column)];
    if (found === undefined || found === null) return;
    begin(data.map.steps[Math.floor(column)]);
    addRow(names[row], typeof found === "string" ? found : format(found));
    place(there);
  }

  function begin(step) {
    tip = document.createElement("div");
    tip.className = "tip";
    tip.append(`step ${step.toLocaleString("en")}`);
  }

  function addRow(name, value, color) {
    const row = document.createElement("div"), chip = document.createElement("i"), shown = document.createElement("b");
    shown.textContent = value;
    row.append(shown);
    if (color) {
      chip.style.background = color;
      row.append(chip);
    }
    row.append(name);
    tip.append(row);
  }

  function place(there) {
    plot.append(tip);
    const room = plot.clientWidth, wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room - wide, there + wide + 18 > room ? there - wide - 12 : there + 12))}px`;
  }

  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", leave);
}

document.querySelectorAll(".plot").forEach(follow);
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
