"use strict";
// The page is whole without this script, repeated layers folded. The script draws the arrows, by
// the rules of the SVG's layout, and unfolds.
const EDGES = JSON.parse(document.getElementById("edges").textContent);
const LANE = 9, SPINE = 48;

function holders(card, root) {
  const found = [];
  for (let at = card.parentElement; at && at !== root.parentElement; at = at.parentElement)
    if (at.classList.contains("items")) found.unshift(at);
  return found;
}

// The card that is drawn for a card, and which copy of which repeats it stands in.
function shown(id, repeats) {
  const copies = new Map();
  for (const repeat of repeats) {
    const { start, stride, count } = repeat.dataset;
    const copy = Math.floor((id - start) / stride);
    if (copy < 0 || copy >= Number(count)) continue;
    copies.set(repeat, copy);
    id -= copy * stride;
  }
  return [id, copies];
}

function visible(root, edges, backward) {
  const repeats = [...root.querySelectorAll(".repeat:not(.open)")];
  const found = new Map();
  for (const [from, fromSlot, to, toSlot, gradient] of edges) {
    if (backward && !gradient) continue;
    const [source, copies] = shown(from, repeats), [target, others] = shown(to, repeats);
    if (source === target || [...others].some(([r, k]) => copies.has(r) && copies.get(r) !== k)) continue;
    found.set([source, fromSlot, target, toSlot].join(), [source, fromSlot, target, toSlot]);
  }
  return [...found.values()];
}

function draw(root) {
  const backward = root.dataset.way === "backward";
  const cards = [...root.querySelectorAll(".card")];
  const order = new Map(cards.map((card, index) => [Number(card.dataset.id), index]));
  const edges = visible(root, EDGES[root.dataset.part], backward);
  const buses = new Map(), spines = new Map();
  for (const [source, fromSlot, target, toSlot] of edges) {
    const a = order.get(source), b = order.get(target);
    if (b === a + 1) { spines.set(a, b); continue; }
    const inner = holders(cards[b], root);
    const holder = holders(cards[a], root).filter((h) => inner.includes(h)).pop();
    const key = `${source}.${fromSlot}.${order.get(Number(holder.querySelector(".card").dataset.id))}.${inner.indexOf(holder)}`;
    const bus = buses.get(key) || { holder, source: [a, fromSlot], targets: [], low: a, high: a };
    bus.targets.push([b, toSlot]);
    bus.low = Math.min(bus.low, b);
    bus.high = Math.max(bus.high, b);
    buses.set(key, bus);
  }
  const taken = new Map();
  for (const bus of [...buses.values()].sort((p, q) => p.high - p.low - (q.high - q.low) || p.low - q.low)) {
    const lanes = taken.get(bus.holder) || [];
    bus.lane = lanes.findIndex((spans) => spans.every(([low, high]) => bus.high < low || bus.low > high));
    if (bus.lane < 0) bus.lane = lanes.push([]) - 1;
    lanes[bus.lane].push([bus.low, bus.high]);
    taken.set(bus.holder, lanes);
  }
  for (const items of root.querySelectorAll(".items"))
    items.style.setProperty("--lanes", (taken.get(items) || []).length);
  wires(root, cards, [...buses.values()], spines, backward);
}

function wires(root, cards, buses, spines, backward) {
  const origin = root.getBoundingClientRect();
  const box = (element) => {
    const r = element.getBoundingClientRect();
    return { left: r.left - origin.left, top: r.top - origin.top, bottom: r.bottom - origin.top };
  };
  const row = ([card, slot]) => box(cards[card].querySelector(`[data-slot="${slot}"]`));
  const parts = [];
  const line = (points) => {
    if (backward) points.reverse();
    const [[x0, y0], [x, y]] = points.slice(-2);
    const head = x0 === x ? `l-3.5 ${y > y0 ? -6 : 6}h7z` : `l${x > x0 ? -6 : 6} -3.5v7z`;
    parts.push(`<path d="M${points.map((p) => p.join(" ")).join("L")}"/><path class="arrow" d="M${x} ${y}${head}"/>`);
  };
  const right = origin.width - SPINE;
  for (const [a, b] of spines) line([[right, box(cards[a]).bottom], [right, box(cards[b]).top]]);
  for (const bus of buses) {
    const style = getComputedStyle(bus.holder);
    const x = box(bus.holder).left + parseFloat(style.paddingLeft) - 6 - LANE * bus.lane;
    const start = row(bus.source), out = (start.top + start.bottom) / 2 + 6;
    for (const target of bus.targets) {
      const end = row(target), into = (end.top + end.bottom) / 2 - 6;
      line([[start.left, out], [x, out], [x, into], [end.left, into]]);
    }
  }
  root.querySelector(":scope > .wires").innerHTML = parts.join("");
}

function open(repeat) {
  const { start, stride } = repeat.dataset;
  const paths = JSON.parse(repeat.dataset.paths), titles = JSON.parse(repeat.dataset.titles);
  const copies = repeat.querySelector(":scope > .copies"), first = copies.firstElementChild;
  for (let copy = 1; copy < paths.length; copy++) {
    const clone = first.cloneNode(true);
    const all = (selector) => [...(clone.matches(selector) ? [clone] : []), ...clone.querySelectorAll(selector)];
    for (const card of all("[data-id]")) card.dataset.id = Number(card.dataset.id) + copy * stride;
    for (const inner of all(".repeat")) {
      inner.dataset.start = Number(inner.dataset.start) + copy * stride;
      inner.dataset.paths = JSON.stringify(JSON.parse(inner.dataset.paths).map((p) => renamed(p, paths, copy)));
    }
    for (const tip of all(".tip")) tip.textContent = renamed(tip.textContent, paths, copy);
    for (const port of all(".port")) port.ariaLabel = renamed(port.ariaLabel, paths, copy);
    clone.querySelector(".name").textContent = titles[copy];
    copies.append(clone);
  }
  const name = first.querySelector(".name");
  name.textContent = titles[0];
  repeat.classList.add("open");
}

const renamed = (text, paths, copy) =>
  text.startsWith(paths[0]) ? paths[copy] + text.slice(paths[0].length) : text;

function close(repeat) {
  const copies = repeat.querySelector(":scope > .copies");
  while (copies.children.length > 1) copies.lastElementChild.remove();
  repeat.classList.remove("open");
}

function toggle(button) {
  const repeat = button.closest(".repeat"), opening = !repeat.classList.contains("open");
  const part = repeat.closest(".root").dataset.part;
  for (const root of document.querySelectorAll(`.root[data-part="${part}"]`)) {
    const twin = root.querySelector(`.repeat[data-start="${repeat.dataset.start}"][data-stride="${repeat.dataset.stride}"]`);
    if (!twin) continue;
    (opening ? open : close)(twin);
    const own = twin.querySelector(":scope > .bar > button");
    own.setAttribute("aria-expanded", opening);
    own.querySelector(".more").textContent = opening ? " fold" : " unfold";
    draw(root);
  }
}

const redraw = () => document.querySelectorAll(".root").forEach(draw);
document.addEventListener("click", (event) => {
  const button = event.target.closest(".repeat > .bar > button");
  if (button) toggle(button);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const port of document.querySelectorAll(".port:hover, .port:focus")) port.classList.add("quiet");
});
for (const kind of ["focusin", "mouseover"])
  document.addEventListener(kind, (event) => {
    if (kind === "focusin" || !event.target.closest(".quiet"))
      document.querySelectorAll(".quiet").forEach((port) => port.classList.remove("quiet"));
  });
for (const button of document.querySelectorAll(".repeat > .bar > button")) button.hidden = false;
new ResizeObserver(redraw).observe(document.querySelector("main"));
redraw();
