// Zooms the timeline and walks through its spans. Without it the page shows the same; only that is missing.
for (const figure of document.querySelectorAll("figure.timeline")) {
  const view = figure.querySelector(".view"), said = figure.querySelector("output"), svg = view.querySelector("svg");
  const plot = svg.querySelector(".plot"), box = svg.viewBox.baseVal, whole = box.width;
  const left = plot.transform.baseVal.consolidate().matrix.e;
  const lanes = [...svg.querySelectorAll(".lane")];
  const spans = lanes.map((lane) => [...lane.querySelectorAll(".s")]);
  const paths = [...plot.querySelectorAll("path")], ticks = [...plot.querySelectorAll(":scope > text")];
  const patterns = [...svg.querySelectorAll("pattern")];
  for (const text of ticks) text.dataset.x = text.getAttribute("x");
  let zoom = 1, lane = 0, place = -1;

  const label = (path, room) => {
    const action = path.firstChild.textContent.split(" ")[0], found = /^(\d+)([A-Z])(\d+)$/.exec(action);
    const short = found[2] === "O" ? ["O"] : [action, found[2] + found[3], found[3]];
    return short.find((text) => text.length * 5.8 + 3 <= room) || "";
  };
  const relabel = () => lanes.forEach((group, row) => {
    group.querySelectorAll("text").forEach((text) => text.remove());
    for (const path of spans[row]) {
      const { x, width } = path.getBBox(), name = label(path, width * zoom);
      if (!name) continue;
      const text = document.createElementNS(svg.namespaceURI, "text");
      text.setAttribute("class", "in");
      text.setAttribute("x", (x + width / 2) * zoom);
      text.setAttribute("y", 12.5);
      text.textContent = name;
      group.append(text);
    }
  });
  const pin = () => {
    const shift = view.scrollLeft * box.width / svg.clientWidth;
    for (const part of svg.querySelectorAll(".gutter, .key")) part.setAttribute("transform", `translate(${shift} 0)`);
  };
  const scaleTo = (wanted, at = 0.5) => {
    const middle = (view.scrollLeft + at * view.clientWidth) / svg.clientWidth;
    zoom = Math.min(64, Math.max(1, wanted));
    svg.setAttribute("viewBox", `0 0 ${left + (whole - left) * zoom} ${box.height}`);
    svg.style.width = zoom === 1 ? "" : `calc(max(100%, 1000px) * ${box.width / whole})`;
    svg.querySelector(".paper").setAttribute("width", box.width);
    for (const path of paths) path.setAttribute("transform", `scale(${zoom} 1)`);
    for (const pattern of patterns) pattern.setAttribute("patternTransform", `scale(${1 / zoom} 1)`);
    for (const text of ticks) text.setAttribute("x", text.dataset.x * zoom);
    relabel();
    view.scrollLeft = middle * svg.clientWidth - at * view.clientWidth;
    pin();
    figure.dataset.zoom = zoom;
  };
  const select = (row, index, scroll) => {
    svg.querySelector(".on")?.classList.remove("on");
    [lane, place] = [row, index];
    const path = spans[row][index], { rank, origin } = lanes[row].dataset;
    path.classList.add("on");
    said.textContent = `rank ${rank}, ${origin}: ${path.firstChild.textContent}`;
    if (!scroll) return;
    const ratio = svg.clientWidth / box.width, { x, width } = path.getBBox();
    const middle = (left + (x + width / 2) * zoom) * ratio;
    if (middle < view.scrollLeft + left * ratio || middle > view.scrollLeft + view.clientWidth)
      view.scrollLeft = middle - view.clientWidth / 2;
  };
  const nearest = (row) => {
    const x = place < 0 ? 0 : spans[lane][place].getBBox().x;
    const away = spans[row].map((path) => Math.abs(path.getBBox().x - x));
    return away.indexOf(Math.min(...away));
  };
  const step = (rows, along) => {
    if (along && place >= 0) {
      const next = place + along;
      if (spans[lane][next]) select(lane, next, true);
      return;
    }
    const row = Math.min(lanes.length - 1, Math.max(0, lane + (place < 0 ? 0 : rows)));
    if (spans[row].length) select(row, nearest(row), true);
  };
  const keys = {
    ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1), ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0),
    "+": () => scaleTo(zoom * 1.5), "=": () => scaleTo(zoom * 1.5), "-": () => scaleTo(zoom / 1.5), 0: () => scaleTo(1),
  };
  view.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const edges = view.getBoundingClientRect();
    scaleTo(zoom * Math.exp(-event.deltaY / 200), (event.clientX - edges.left) / edges.width);
  }, { passive: false });
  view.addEventListener("scroll", pin);
  svg.addEventListener("pointerover", (event) => {
    const row = spans.findIndex((some) => some.includes(event.target));
    if (row >= 0) select(row, spans[row].indexOf(event.target), false);
  });
  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", () => scaleTo({ in: zoom * 2, out: zoom / 2, all: 1 }[button.value]));
  figure.querySelector(".tools").hidden = false;
}
