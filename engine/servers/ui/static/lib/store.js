// A value that components can watch.
import { useEffect, useState } from "preact/hooks";

export class Store {
  #value;
  #watchers = new Set();

  constructor(value) {
    this.#value = value;
  }

  get value() {
    return this.#value;
  }

  set(value) {
    const next = typeof value === "function" ? value(this.#value) : value;
    if (next === this.#value) return;
    this.#value = next;
    for (const watcher of [...this.#watchers]) watcher(next);
  }

  // Calls `watcher` after each change. Returns a function that ends this.
  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }
}

// The value of `store`. The component is rendered again when it changes.
export function useStore(store) {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(() => store.value);
    return store.watch((next) => setValue(() => next));
  }, [store]);
  return value;
}

// A store whose value is kept in this browser as JSON.
export function keptStore(name, fallback) {
  const key = `engine.${name}`;
  let value = fallback;
  try {
    const kept = localStorage.getItem(key);
    if (kept !== null) value = { ...fallback, ...JSON.parse(kept) };
  } catch {
    localStorage.removeItem(key); // it is not JSON
  }
  const store = new Store(value);
  store.watch((next) => localStorage.setItem(key, JSON.stringify(next)));
  return store;
}
