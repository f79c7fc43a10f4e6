// Runs before the first paint, so that the page never flashes in the wrong colours.
document.documentElement.dataset.theme =
  localStorage.getItem("engine.theme") ??
  (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
