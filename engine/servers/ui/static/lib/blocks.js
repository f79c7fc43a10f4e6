// Splits growing Markdown into top-level blocks. A block that has ended never changes again, so it
// is parsed and laid out once, however long the answer becomes.

// A block longer than this many characters is cut at the end of a line, or of a sentence.
const MAX_BLOCK = 3000;
// In this many characters after that, the end of a sentence is looked for.
const WINDOW = 600;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const INNER_FENCE = /^\s*(`{3,}|~{3,})/;
const HEADING = /^ {0,3}#{1,6}(\s|$)/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)])(\s|$)/;
const TABLE_RULE = /^ {0,3}\|?[\s:|-]*-[\s:|-]*\|[\s:|-]*$/;

export class BlockSplitter {
  #start = 0; // offset of the open block
  #next = 0; // offset of the first line that was not read yet
  #kind = null; // null (no block is open), "fence", "list", "table" or "text"
  #fence = ""; // the marker that ends the open fence
  #blank = false; // whether the last line was blank
  #head = ""; // the header of the open table, which is repeated if the table is cut

  // Where the open block starts.
  get openAt() {
    return this.#start;
  }

  get openKind() {
    return this.#kind;
  }

  // What the parser must read before the open block.
  get openHead() {
    return this.#head;
  }

  // Reads the lines of `text` that are new. Returns the blocks that have ended, as source texts.
  feed(text, done) {
    const ended = [];
    const end = (at) => {
      const source = this.#head + text.slice(this.#start, at);
      if (source.trim()) ended.push(source);
      this.#start = at;
      this.#kind = null;
      this.#head = "";
      this.#blank = false;
    };
    for (;;) {
      const newline = text.indexOf("\n", this.#next);
      if (newline < 0) break;
      this.#line(text, text.slice(this.#next, newline), newline + 1, end);
      this.#next = newline + 1;
    }
    if (done) {
      if (this.#next < text.length) this.#line(text, text.slice(this.#next), text.length, end);
      this.#next = text.length;
      end(text.length);
    } else if (text.length - this.#start > MAX_BLOCK + WINDOW) {
      const line = text.slice(this.#next, this.#next + 20);
      if (this.#kind === null && !FENCE.test(line) && !ITEM.test(line)) this.#kind = "text";
      this.#cutText(text, text.length, end);
    }
    return ended;
  }

  #line(text, line, after, end) {
    if (this.#fence) {
      const found = INNER_FENCE.exec(line);
      const closes = found && found[1].startsWith(this.#fence) && !line.trim().slice(found[1].length).trim();
      if (closes) {
        this.#fence = "";
        if (this.#kind === "fence") end(after);
      }
      return;
    }
    const blank = !line.trim();
    if (this.#kind === "list" && this.#blank && !blank && !ITEM.test(line) && !/^\s/.test(line)) {
      end(this.#next);
    } else if (this.#kind && this.#kind !== "list" && blank) {
      end(after);
      return;
    }
    if (blank) {
      this.#blank = true;
      if (this.#kind === null) this.#start = after;
      return;
    }
    this.#open(line, end);
    this.#blank = false;
    this.#cutText(text, after, end);
    if (HEADING.test(line) && this.#kind === "text") end(after);
    else if (after - this.#start > MAX_BLOCK && !this.#fence) this.#cutLine(text, after, end);
  }

  // Starts a block with `line`, or continues the open one.
  #open(line, end) {
    const fence = this.#kind === "list" ? INNER_FENCE.exec(line) : FENCE.exec(line);
    if (fence) {
      if (this.#kind !== "list") {
        if (this.#kind) end(this.#next);
        this.#kind = "fence";
      }
      this.#fence = fence[1];
    } else if (this.#kind === "text" && HEADING.test(line)) {
      end(this.#next);
      this.#kind = "text";
    } else if (this.#kind === "text" && TABLE_RULE.test(line)) {
      this.#kind = "table";
    } else if (this.#kind === null) {
      this.#kind = ITEM.test(line) ? "list" : "text";
    }
  }

  // Cuts a long block at the end of a line. An item of a list stays whole, and a table gets its
  // header again.
  #cutLine(text, after, end) {
    if (this.#kind === "table") {
      const head = this.#head || text.slice(this.#start, after).split("\n", 2).join("\n") + "\n";
      end(after);
      this.#kind = "table";
      this.#head = head;
    } else if (this.#kind === "list") {
      const line = text.slice(this.#next, after);
      if (!ITEM.test(line) || this.#next === this.#start) return;
      end(this.#next);
      this.#kind = "list";
    } else {
      end(after);
    }
  }

  // Cuts a paragraph that has no line breaks before `limit`. The place does not depend on how much
  // of the text was known at the time.
  #cutText(text, limit, end) {
    while (this.#kind === "text" && limit - this.#start > MAX_BLOCK + WINDOW) {
      const from = Math.max(this.#start + MAX_BLOCK, this.#next);
      const sentence = text.slice(from, from + WINDOW).indexOf(". ");
      const at = sentence < 0 ? text.indexOf(" ", from) + 1 : from + sentence + 2;
      if (at <= from || at >= limit) return;
      end(at);
      this.#next = at;
      this.#kind = "text";
    }
  }
}
