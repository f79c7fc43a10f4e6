// A line chart of the last minutes, drawn by uPlot in the colours of the theme.
import uPlot from "uplot";
import { html, useEffect, useRef } from "../lib/html.js";
import { loadStyle } from "../lib/parts.js";
import { WINDOW_S } from "./feed.js";

await loadStyle(new URL("../vendor/uplot/uPlot.min.css", import.meta.url).href);

const TICK_S = 60;
const TICKS = Array.from({ length: WINDOW_S / TICK_S + 1 }, (_, index) => index * TICK_S - WINDOW_S);
const HEIGHT = 168;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function withAlpha(value, alpha) {
  return `color-mix(in srgb, ${value} ${alpha}%, transparent)`;
}

function optionsOf(series, width, format) {
  const faint = colour("--faint");
  const grid = { stroke: colour("--line"), width: 1 };
  const font = `12px ${colour("--font")}`;
  return {
    width,
    height: HEIGHT,
    cursor: { show: false },
    legend: { show: false },
    padding: [8, 16, 0, 0],
    scales: { x: { time: false, range: () => [-WINDOW_S, 0] }, y: { range: (_, __, high) => [0, Math.max(high * 1.15, 4)] } },
    axes: [
      { stroke: faint, font, grid: { show: false }, ticks: { show: false }, size: 24, splits: () => TICKS, values: (_, all) => all.map((each) => (each ? `${each / 60} min` : "now")) },
      { stroke: faint, font, grid, ticks: { show: false }, size: 46, values: (_, all) => all.map(format) },
    ],
    series: [
      {},
      ...series.map((each) => ({
        stroke: colour(each.colour),
        fill: each.filled ? withAlpha(colour(each.colour), 16) : undefined,
        width: 2,
        points: { show: false },
        paths: uPlot.paths.linear(),
      })),
    ],
  };
}

// `series` are `{ label, colour, values, filled }`, and `at` are the times of the values.
export function Chart({ title, at, series, format = (value) => String(value) }) {
  const box = useRef(null);
  const plot = useRef(null);
  const last = at.at(-1) ?? 0;
  const data = [at.map((each) => each - last), ...series.map((each) => each.values)];
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(optionsOf(series, box.current.clientWidth, format), latest.current, box.current);
    };
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    draw();
    observer.observe(box.current);
    addEventListener("themechange", draw);
    return () => {
      removeEventListener("themechange", draw);
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [at]);
  return html`<figure class="chart">
    <figcaption>
      <h2>${title}</h2>
      <span class="legend">
        ${series.map((each) => html`<span><i class=${`swatch ${each.colour.slice(2)}`}></i>${each.label} <b class="num">${format(each.values.at(-1) ?? 0)}</b></span>`)}
      </span>
    </figcaption>
    <div ref=${box}></div>
  </figure>`;
}
