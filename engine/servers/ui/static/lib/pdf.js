// The text of PDF files. The library is loaded with the first of them.

const MAX_PAGES = 500;

export async function pdfText(file) {
  const [library, worker] = await Promise.all([import("../vendor/pdfjs/pdf.min.mjs"), import("../vendor/pdfjs/pdf.worker.min.mjs")]);
  globalThis.pdfjsWorker = worker; // it runs here, because the page's policy allows no workers
  const data = new Uint8Array(await file.arrayBuffer());
  const opened = await library.getDocument({ data, disableFontFace: true, useSystemFonts: false, useWorkerFetch: false, verbosity: 0 }).promise;
  try {
    const pages = [];
    for (let number = 1; number <= Math.min(opened.numPages, MAX_PAGES); number++) {
      const { items } = await (await opened.getPage(number)).getTextContent();
      pages.push(items.map((each) => (each.str ?? "") + (each.hasEOL ? "\n" : "")).join("").trim());
    }
    return pages.filter(Boolean).join("\n\n");
  } finally {
    await opened.loadingTask.destroy();
  }
}
