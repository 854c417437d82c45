"use strict";
// The page says everything without this. With it, samples can be filtered, tables sorted and commands copied.

for (const list of document.querySelectorAll("[data-filter]")) {
  const cards = [...list.children];
  const command = (card) => card.querySelector("[data-copy]")?.textContent ?? ""; // the same in all of them
  const words = cards.map((card) => card.textContent.replace(command(card), "").toLowerCase());
  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = "words of a prompt, a row, a size …";
  box.setAttribute("aria-label", list.dataset.filter);
  const count = document.createElement("span");
  count.className = "soft";
  count.setAttribute("aria-live", "polite");
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.append(box, count);
  list.before(bar);
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    cards.forEach((card, place) => {
      card.hidden = !wanted.every((word) => words[place].includes(word));
      left += card.hidden ? 0 : 1;
    });
    count.textContent = wanted.length ? `${left} of ${cards.length}` : "";
  });
}

for (const table of document.querySelectorAll("table[data-sort]")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      const order = (one, other) => text(one).localeCompare(text(other), undefined, { numeric: true });
      body.append(...[...body.rows].sort((one, other) => (down ? order(other, one) : order(one, other))));
    });
  });
}

for (const line of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.setAttribute("aria-label", "copy the command that excludes this sample");
  const said = () => {
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  button.addEventListener("click", () => {
    const code = line.querySelector("code");
    getSelection().selectAllChildren(code);
    // A page that was opened as a file may have no clipboard, or not be allowed to use it; the older way needs neither.
    const copied = () => document.execCommand("copy") && said();
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(said, copied);
    else copied();
  });
  line.append(button);
}
