// The KV blocks, and the radix tree as an icicle: each node is as wide as its part of the tree.
import { html } from "../lib/html.js";
import { count, many, percent } from "./format.js";

const ROW_HEIGHT = 26;
const WIDTH = 1000;
const MAX_LEVELS = 7;

export function Blocks({ stats }) {
  const { num_blocks: all, num_free_blocks: free, num_referenced_blocks: used, block_size: size } = stats;
  const cached = Math.max(all - free - used, 0);
  const parts = [
    ["in use", "c1", used],
    ["cached", "c2", cached],
    ["free", "none", free],
  ];
  return html`<div class="blocks">
    <div class="stacked" role="img" aria-label=${`${used} of ${all} blocks are in use, ${cached} are cached`}>
      ${parts.map(([name, colour, value]) => html`<span class=${`seg ${colour}`} style=${{ width: `${(100 * value) / Math.max(all, 1)}%` }} title=${`${name}: ${value} blocks`}></span>`)}
    </div>
    <p class="legend">
      ${parts.map(([name, colour, value]) => html`<span><i class=${`swatch ${colour}`}></i>${name} <b class="num">${count(value)}</b></span>`)}
      <span class="muted">of ${count(all)} blocks of ${size} tokens</span>
    </p>
  </div>`;
}

// Places each node below its parent: `{ x, width, level }` in a box that is WIDTH wide.
function placed(nodes) {
  const below = nodes.map(() => 0);
  for (let index = nodes.length - 1; index >= 0; index--) {
    const own = nodes[index].num_blocks;
    below[index] = Math.max(below[index], 0) + own;
    if (nodes[index].parent >= 0) below[nodes[index].parent] += below[index];
  }
  const top = nodes.reduce((sum, each, index) => (each.parent < 0 ? sum + below[index] : sum), 0);
  const cursor = nodes.map(() => 0);
  const found = [];
  let next = 0;
  for (const [index, node] of nodes.entries()) {
    const width = (WIDTH * below[index]) / Math.max(top, 1);
    const parent = node.parent < 0 ? null : found[node.parent];
    const x = parent ? cursor[node.parent] : next;
    if (parent) cursor[node.parent] += width;
    else next += width;
    cursor[index] = x;
    found.push({ ...node, x, width, level: parent ? parent.level + 1 : 0 });
  }
  return found;
}

export function Tree({ tree, blockSize }) {
  if (!tree.nodes.length) return html`<p class="empty">The prefix cache is empty.</p>`;
  const nodes = placed(tree.nodes).filter((each) => each.level < MAX_LEVELS && each.width >= 1);
  const height = ROW_HEIGHT * (1 + Math.max(...nodes.map((each) => each.level)));
  return html`<svg class="tree" viewBox=${`0 0 ${WIDTH} ${height}`} preserveAspectRatio="none" height=${height} role="img" aria-label=${`Radix tree with ${tree.num_nodes} nodes`}>
    ${nodes.map((each) => {
      const kind = each.num_holders > 1 ? "shared" : each.num_holders ? "held" : each.num_uses ? "used" : "idle";
      const what = `${count(each.num_blocks * blockSize)} tokens, used ${each.num_uses} times, held by ${each.num_holders} running`;
      return html`<rect class=${kind} x=${each.x + 0.75} y=${each.level * ROW_HEIGHT + 1} width=${Math.max(each.width - 1.5, 0.5)} height=${ROW_HEIGHT - 2} rx="2"><title>${what}</title></rect>`;
    })}
  </svg>
  <p class="legend">
    <span><i class="swatch c4"></i>shared</span><span><i class="swatch c1"></i>in use</span><span><i class="swatch c2"></i>reused before</span><span><i class="swatch faint"></i>not reused yet</span>
    <span class="muted">${many(tree.num_nodes, "node")}, ${many(tree.num_blocks * blockSize, "token")}${tree.num_shared ? `, ${tree.num_shared} shared` : ""}</span>
  </p>`;
}

export function Tiers({ tiers }) {
  return html`<h3>Tiers below the KV pool</h3>
    <div class="scroll"><table class="table">
      <thead><tr><th>Tier</th><th class="right">Blocks</th><th class="right">MB</th><th class="right">Hits</th><th class="right">Misses</th><th class="right">Tokens saved</th></tr></thead>
      <tbody>
        ${tiers.map((each) => html`<tr><td><span class=${`dot ${each.is_up ? "ready" : "down"}`}></span> ${each.name}</td><td class="num right">${count(each.num_blocks)}</td><td class="num right">${count(each.num_bytes / 1e6)}</td><td class="num right">${count(each.hits)}</td><td class="num right">${count(each.misses)}</td><td class="num right">${count(each.saved_tokens)}</td></tr>`)}
      </tbody>
    </table></div>`;
}

export function Kernels({ kernels }) {
  const all = Object.entries(kernels).sort((a, b) => b[1] - a[1]);
  const total = all.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return html`<p class="empty">Kernel times appear with the next step. Only the native backend measures them.</p>`;
  const shown = all.slice(0, 8);
  return html`<ul class="kernels">
    ${shown.map(
      ([name, value]) => html`<li>
        <span class="kernel-name">${name}</span>
        <span class="track"><span class="seg c5" style=${{ width: `${(100 * value) / shown[0][1]}%` }}></span></span>
        <span class="num kernel-ms">${(value * 1000).toFixed(2)} ms</span>
        <span class="num muted kernel-share">${percent(value, total)}</span>
      </li>`,
    )}
  </ul>`;
}
