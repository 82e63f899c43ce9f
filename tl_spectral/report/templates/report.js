"use strict";
// Draws the figures in the reader's light or dark colours, and again when a switch, the theme or the
// width class changes.
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");
const panels = [...document.querySelectorAll(".panel")];
const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };

function merge(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    target[name] = nested ? merge(target[name] || {}, value) : value;
  }
  return target;
}

function chosen(panel) {
  return [...panel.querySelectorAll(".controls > *")].map((control) => {
    const slider = control.querySelector("input[type=range]");
    if (!slider) return control.querySelector("input:checked").value;
    const option = JSON.parse(slider.dataset.options)[slider.value];
    slider.setAttribute("aria-valuetext", option);
    control.querySelector("output").textContent = option;
    return option;
  }).join("|");
}

function draw(panel, printing = false) {
  const key = chosen(panel);
  const plot = panel.querySelector(".plot");
  const sources = [...panel.querySelectorAll("script[data-key]")];
  const source = sources.find((element) => element.dataset.key === key);
  let message = panel.querySelector(".absent");
  plot.hidden = !source;
  if (!source) {
    if (!message) {
      message = document.createElement("p");
      message.className = "note absent";
      message.textContent = "This run has no numbers for this choice.";
      plot.after(message);
    }
    return;
  }
  if (message) message.remove();
  let text = source.textContent;
  if (dark.matches && !printing) {
    text = text.replace(/#[0-9A-F]{6}/g, (colour) => DARK[colour] || colour);
  }
  const figure = JSON.parse(text);
  const layout = figure.layout;
  if (narrow.matches && layout.meta) merge(layout, layout.meta.narrow);
  if (narrow.matches) layout.dragmode = false;  // a finger on a figure scrolls the page
  layout.autosize = true;
  plot.style.minHeight = layout.height + "px";
  Plotly.react(plot, figure.data, layout, { ...CONFIG, displayModeBar: narrow.matches ? false : "hover" });
}

function redraw(printing = false) {
  panels.forEach((panel) => draw(panel, printing));
}

for (const panel of panels) {
  draw(panel);
  panel.addEventListener("input", () => draw(panel));
}
// A scroll bar that appears while figures are drawn narrows the page under those drawn before it.
const width = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.data && !target.hidden) Plotly.Plots.resize(target);
});
document.querySelectorAll(".plot").forEach((plot) => width.observe(plot));
dark.addEventListener("change", () => redraw());
narrow.addEventListener("change", () => redraw());
addEventListener("beforeprint", () => redraw(true));
addEventListener("afterprint", () => redraw());

// The section being read is marked in the navigation.
const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const reading = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    links.forEach((a) => a.removeAttribute("aria-current"));
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }
}, { rootMargin: "-20% 0px -75% 0px" });
document.querySelectorAll("main > section").forEach((section) => reading.observe(section));
