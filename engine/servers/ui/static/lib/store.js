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

// A store of fields that are kept in this browser as JSON. Other tabs keep their own values meanwhile, so only those that
// change are written.
export function keptStore(name, fallback) {
  const key = `engine.${name}`;
  const read = () => {
    try {
      return JSON.parse(localStorage.getItem(key)) ?? {};
    } catch {
      return {}; // it is not JSON
    }
  };
  let before = { ...fallback, ...read() };
  const store = new Store(before);
  store.watch((next) => {
    const changed = Object.entries(next).filter(([field, value]) => value !== before[field]);
    before = next;
    localStorage.setItem(key, JSON.stringify({ ...read(), ...Object.fromEntries(changed) }));
  });
  return store;
}
