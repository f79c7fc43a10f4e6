// Snapshots of the server, from one SSE stream that is open while the page is looked at.
import { events, keyNeeded, request } from "../lib/api.js";
import { useEffect, useState } from "../lib/html.js";

const RETRY_MS = 1500;
// The charts show this many seconds.
export const WINDOW_S = 300;

// `{ now, history, error }`: the latest snapshot, and arrays of the last minutes, with which the stream begins.
export function useFeed() {
  const [state, setState] = useState({ now: null, history: emptyHistory(), error: null });
  useEffect(() => {
    let ended = false;
    let running = null;
    let timer = 0;
    const start = async () => {
      clearTimeout(timer);
      if (ended || document.hidden || running) return;
      const stream = (running = new AbortController());
      let error = null;
      try {
        const response = await request("/v1/admin/live", { signal: stream.signal });
        for await (const { event, data } of events(response)) {
          if (event === "past") setState((before) => ({ ...before, history: data.reduce(extended, emptyHistory()) }));
          else setState((before) => ({ now: data, history: extended(before.history, { ...data, ...data.stats }), error: null }));
        }
      } catch (failure) {
        error = failure.name === "AbortError" ? null : failure;
      }
      if (running === stream) running = null;
      if (error) setState((before) => ({ ...before, error }));
      if (!ended && !document.hidden && !keyNeeded.value) timer = setTimeout(start, RETRY_MS);
    };
    const stop = () => {
      running?.abort();
      running = null;
    };
    const onVisible = () => (document.hidden ? stop() : start());
    document.addEventListener("visibilitychange", onVisible);
    const unwatch = keyNeeded.watch((needed) => !needed && start());
    start();
    return () => {
      ended = true;
      clearTimeout(timer);
      unwatch();
      document.removeEventListener("visibilitychange", onVisible);
      stop();
    };
  }, []);
  return state;
}

function emptyHistory() {
  return { at: [], decode: [], prefill: [], running: [], waiting: [] };
}

function extended(history, { at, rates, num_running: running = 0, num_waiting: waiting = 0 }) {
  const computed = (rates.prompt_tokens ?? 0) - (rates.cached_tokens ?? 0);
  const point = { at, decode: rates.generated_tokens ?? 0, prefill: Math.max(computed, 0), running, waiting };
  const from = history.at.findIndex((each) => each > at - WINDOW_S);
  const next = {};
  for (const [name, value] of Object.entries(point)) next[name] = [...(from < 0 ? [] : history[name].slice(from)), value];
  return next;
}
