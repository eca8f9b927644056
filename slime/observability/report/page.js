// Shows the values under the pointer, from the data of the series. The page needs no script for anything else.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);

  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
  };

  const read = (svg) => [...svg.querySelectorAll(".series")].map((group) => ({
    name: group.dataset.name,
    color: [...group.classList].filter((name) => /^(p|c\d)$/.test(name)).join(" "),
    steps: group.dataset.x.split(" ").map(Number),
    values: group.dataset.y.split(" "),
  }));

  const row = (one, value) => {
    const line = document.createElement("div"), swatch = document.createElement("i"), number = document.createElement("b");
    swatch.className = `swatch ${one.color}`;
    number.textContent = value;
    line.append(swatch, document.createTextNode(one.name), number);
    return line;
  };

  for (const svg of document.querySelectorAll("svg.chart")) {
    const [low, high, left, right, width] = svg.dataset.axis.split(" ").map(Number);
    const cross = svg.querySelector(".cross");
    let series = null;
    svg.addEventListener("pointermove", (event) => {
      series ??= read(svg);
      const box = svg.getBoundingClientRect();
      const wanted = low + ((event.clientX - box.left) / box.width * width - left) / (right - left) * (high - low);
      const found = series.map((one) => nearest(one.steps, wanted));
      const distances = series.map((one, i) => Math.abs(one.steps[found[i]] - wanted));
      const closest = distances.indexOf(Math.min(...distances));
      const step = series[closest].steps[found[closest]];
      const reach = (high - low) / 100;
      const lines = series.flatMap((one, i) => Math.abs(one.steps[found[i]] - step) <= reach ? [row(one, one.values[found[i]])] : []);
      const title = document.createElement("strong");
      title.textContent = step < 0 ? "before step 0" : `step ${step}`;
      tip.replaceChildren(title, ...lines);
      tip.hidden = false;
      const x = left + (step - low) / (high - low) * (right - left);
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.classList.add("on");
      const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
      tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, room))}px`;
      tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 14)}px`;
    });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cross.classList.remove("on");
    });
  }
})();
