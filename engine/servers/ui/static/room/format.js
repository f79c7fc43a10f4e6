// Numbers as people read them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${Math.round(value * 1000)} ms`;
  return `${(value * 1000).toFixed(1)} ms`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en");
}

// "1 token", "2 tokens".
export function many(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function duration(value) {
  const minutes = Math.floor(value / 60);
  const hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(value)} s`;
}

// The end of an id, which differs between requests. The start is the same for all.
export function shortId(id) {
  return id.length > 14 ? `…${id.slice(-8)}` : id;
}
