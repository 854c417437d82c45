"use strict";
// The page says everything without this. With it, samples can be filtered, sorted, paged and picked, tables sorted, and
// commands copied. Text of a shard only ever becomes text, never markup.

const element = (name, className, ...children) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
};

const button = (text, label, click) => {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", click);
  return made;
};

const copying = (code, label) => {
  const made = button("copy", label, () => {
    const said = () => {
      made.textContent = "copied";
      setTimeout(() => (made.textContent = "copy"), 1500);
    };
    getSelection().selectAllChildren(code);
    // A page that was opened as a file may have no clipboard, or not be allowed to use it; the older way needs neither.
    const copied = () => document.execCommand("copy") && said();
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(said, copied);
    else copied();
  });
  return made;
};

// Picked samples: one command leaves all of them out.

const picks = new Map(); // key -> folder, quoted for a shell
const picked = (() => {
  const count = element("strong");
  const code = element("code");
  const bar = element("div", "picks", count, code, copying(code, "copy the command that excludes the picked samples"));
  bar.append(button("clear", "pick none", () => (picks.clear(), show())));
  bar.setAttribute("role", "region");
  bar.setAttribute("aria-label", "Picked samples");
  bar.hidden = true;
  document.body.append(bar);
  const show = () => {
    const folders = [...new Set(picks.values())].join(" ");
    bar.hidden = !picks.size;
    count.textContent = `${picks.size.toLocaleString("en")} picked`;
    code.textContent = `qie-stats ${folders} ${[...picks.keys()].map((key) => `--exclude ${key}`).join(" ")}`;
    for (const box of document.querySelectorAll("[data-pick]")) box.checked = picks.has(box.dataset.pick);
  };
  return show;
})();

const picking = (key, folder, name) => {
  const box = element("input");
  box.type = "checkbox";
  box.dataset.pick = key;
  box.checked = picks.has(key);
  box.setAttribute("aria-label", `pick ${name}`);
  box.addEventListener("change", () => {
    if (box.checked) picks.set(key, folder);
    else picks.delete(key);
    picked();
  });
  return element("label", "pick", box, "pick");
};

// The samples that are in the page itself.

for (const list of document.querySelectorAll("[data-filter]")) {
  const cards = [...list.children];
  const command = (card) => card.querySelector("[data-copy]")?.textContent ?? ""; // the same in all of them
  const words = cards.map((card) => card.textContent.replace(command(card), "").toLowerCase());
  const box = element("input");
  box.type = "search";
  box.placeholder = "words of a prompt, a row, a size …";
  box.setAttribute("aria-label", list.dataset.filter);
  const count = element("span", "soft");
  count.setAttribute("aria-live", "polite");
  list.before(element("div", "filter", box, count));
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    cards.forEach((card, place) => {
      card.hidden = !wanted.every((word) => words[place].includes(word));
      left += card.hidden ? 0 : 1;
    });
    count.textContent = wanted.length ? `${left} of ${cards.length}` : "";
  });
  for (const card of cards) {
    const title = card.querySelector("h3");
    title.before(picking(card.dataset.key, card.dataset.folder, title.textContent));
  }
}

for (const table of document.querySelectorAll("table[data-sort]")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const sorting = button("", "", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      const order = (one, other) => text(one).localeCompare(text(other), undefined, { numeric: true });
      body.append(...[...body.rows].sort((one, other) => (down ? order(other, one) : order(one, other))));
    });
    sorting.append(...head.childNodes);
    head.append(sorting);
  });
}

for (const line of document.querySelectorAll("[data-copy]"))
  line.append(copying(line.querySelector("code"), "copy the command that excludes this sample"));

// All rows: facts as columns, pictures in chunks that are loaded when they are to be seen.

const KEY = 16; // characters of each
const PAGE = 24;
const KEPT = 64; // chunks in memory

function browse(place, facts, source) {
  const rows = [...facts.row.keys()];
  const reasons = (at) => (facts.why[at] ?? []).map((number) => facts.reasons[number]);
  const name = (at) => `row ${facts.row[at]}` + (facts.variant[at] ? `, variant ${facts.variant[at]}` : "");
  const size = (at) => facts.sizes[facts.size[at]];
  let words = null; // of each row, made when somebody asks for words
  const text = (at) =>
    [name(at), facts.name[at], facts.sources[facts.source[at]], ...size(at).slice(0, 2), facts.prompt[at]]
      .concat(reasons(at))
      .join("\n")
      .toLowerCase();

  const field = (label, input) => element("label", "", element("span", "soft", label), input);
  const choice = (options) => {
    const made = element("select");
    for (const [value, shown] of options) made.append(new Option(shown, value));
    made.addEventListener("change", () => show(true));
    return made;
  };
  const number = (label) => {
    const made = element("input", "short");
    made.type = "number";
    made.min = "0";
    made.setAttribute("aria-label", label);
    made.addEventListener("input", () => show(true));
    return made;
  };
  const counted = (of) => {
    const counts = new Map();
    for (const at of rows) for (const one of of(at)) counts.set(one, (counts.get(one) ?? 0) + 1);
    return [...counts].sort((one, other) => other[1] - one[1]);
  };
  const words_ = element("input");
  words_.type = "search";
  words_.placeholder = "words, a name, a reason …";
  words_.setAttribute("aria-label", "Show rows with these words");
  words_.addEventListener("input", () => show(true));
  const shape = (number) => (facts.sizes[number][0] ? `${facts.sizes[number][0]} from ${facts.sizes[number][1]}` : "none");
  const sizes = counted((at) => [facts.size[at]]).map(([one, count]) => [String(one), `${shape(one)} (${count})`]);
  const sized = choice([["", "any"], ...sizes]);
  const why = counted((at) => facts.why[at] ?? []);
  const told = why.map(([one, count]) => [String(one), `${facts.reasons[one]} (${count})`]);
  const reason = choice([["", "any, or none"], ["any", "any"], ["none", "none"], ...told]);
  const least = number("least tokens");
  const most = number("most tokens");
  const orders = {
    row: null,
    tokens: (at) => facts.tokens[at],
    size: (at) => size(at)[2],
    name: (at) => facts.name[at],
    prompt: (at) => facts.prompt[at],
    reasons: (at) => -(facts.why[at] ?? []).length,
  };
  const sorted = choice(Object.keys(orders).map((one) => [one, one]));
  const turned = choice([["up", "ascending"], ["down", "descending"]]);
  const list = element("ul", "gallery");
  const count = element("span", "soft count");
  count.setAttribute("aria-live", "polite");
  const bar = element("div", "filter", words_);
  bar.append(field("size", sized), field("reason", reason), field("tokens", element("span", "", least, " – ", most)));
  bar.append(field("sort by", element("span", "", sorted, " ", turned)), count);
  const pages = [document.createElement("nav"), document.createElement("nav")];
  let found = rows;
  let page = 0;

  function matching() {
    const wanted = words_.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (wanted.length) words ??= rows.map(text);
    const low = least.value === "" ? -Infinity : Number(least.value);
    const high = most.value === "" ? Infinity : Number(most.value);
    const due = (at) => {
      if (facts.tokens[at] < low || facts.tokens[at] > high) return false;
      if (sized.value !== "" && facts.size[at] !== Number(sized.value)) return false;
      const its = facts.why[at] ?? [];
      if (reason.value === "any" && !its.length) return false;
      if (reason.value === "none" && its.length) return false;
      if (!["", "any", "none"].includes(reason.value) && !its.includes(Number(reason.value))) return false;
      return wanted.every((word) => words[at].includes(word));
    };
    const left = rows.filter(due);
    const by = orders[sorted.value];
    if (by) {
      const values = new Map(left.map((at) => [at, by(at)]));
      const order = (one, other) => (values.get(one) < values.get(other) ? -1 : values.get(one) > values.get(other) ? 1 : 0);
      left.sort((one, other) => order(one, other) || one - other);
    }
    return turned.value === "down" ? left.reverse() : left;
  }

  function go(to) {
    page = to;
    show(false);
    bar.scrollIntoView();
  }

  function pager(nav) {
    const last = Math.max(Math.ceil(found.length / PAGE) - 1, 0);
    const step = (shown, label, to) => {
      const made = button(shown, label, () => go(to));
      made.disabled = to < 0 || to > last || to === page;
      return made;
    };
    const where = found.length ? `${page * PAGE + 1}–${Math.min((page + 1) * PAGE, found.length)} of ` : "";
    const at = element("span", "soft", `${where}${found.length.toLocaleString("en")}`);
    nav.className = "pager";
    nav.setAttribute("aria-label", "Pages of samples");
    nav.replaceChildren(step("«", "first page", 0), step("‹", "page before", page - 1), at);
    nav.append(step("›", "next page", page + 1), step("»", "last page", last));
  }

  function show(anew) {
    if (anew) {
      found = matching();
      page = 0;
    }
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
    list.replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map(card));
    pages.forEach(pager);
  }

  function card(at) {
    const [target, controls] = size(at);
    const known = [
      ["name", facts.name[at]],
      ["source", facts.sources[facts.source[at]]],
      ["size", target],
      ["from", target && (controls === "text" ? controls : `${controls} px`)],
      ["tokens", target && facts.tokens[at].toLocaleString("en")],
    ];
    const key = facts.keys.slice(at * KEY, (at + 1) * KEY);
    const listed = element("dl");
    for (const [what, value] of known)
      if (value) listed.append(element("dt", "", what), element("dd", "", element("bdi", "", value)));
    const about = element("div", "about", element("h3", "", name(at)));
    if (key) {
      about.prepend(picking(key, facts.folders[facts.folder[at]], name(at)));
      const prompt = element("p", "prompt", facts.prompt[at]);
      prompt.dir = "auto";
      about.append(prompt);
    }
    for (const one of reasons(at)) about.append(element("p", "reason", element("bdi", "", one)));
    about.append(listed);
    const shots = element("div", "shots");
    if (at < facts.samples) source(at, (found) => fill(shots, found, name(at)));
    else shots.append(element("span", "", "skipped"));
    return element("li", "", shots, about);
  }

  place.replaceChildren(bar, pages[0], list, pages[1]);
  show(true);
}

function fill(shots, found, name) {
  if (typeof found === "string" || !found) {
    shots.replaceChildren(element("span", "", found || "no picture"));
    return;
  }
  const [width, height, spots, content] = found;
  const part = (kind, [, x, w, h], alt) => {
    const image = new Image();
    image.alt = alt;
    image.src = `data:image/jpeg;base64,${content}`;
    image.style.width = `${(100 * width) / w}%`;
    image.style.left = `${(-100 * x) / w}%`;
    const frame = element("div", kind, image);
    frame.style.aspectRatio = `${w} / ${h}`;
    return frame;
  };
  const seen = spots.filter(([kind]) => kind !== "mask");
  const made = seen.map((spot) => {
    const frame = part(`shot cut ${spot[0]}`, spot, `${spot[0] === "rejected" ? "rejected target" : spot[0]} of ${name}`);
    frame.style.maxWidth = `calc(var(--tall) * ${spot[2]} / ${spot[3]})`;
    return frame;
  });
  const mask = spots.find(([kind]) => kind === "mask");
  if (mask) made[seen.findIndex(([kind]) => kind === "target")].append(part("cut mask", mask, "its mask"));
  const target = seen.findIndex(([kind]) => kind === "target");
  if (target >= 0 && target < made.length - 1) made.push(element("div", "both", ...made.splice(target)));
  shots.replaceChildren(...made);
}

const all = document.querySelector("#all-rows");
if (all) {
  const about = JSON.parse(all.textContent);
  const place = all.parentElement;
  const chunks = new Map((about.chunks ?? []).map((chunk, number) => [number, chunk]));
  const waiting = new Map(); // number of a chunk -> what waits for it
  const missing = "this picture is in a folder that belongs beside the page, and is not there";
  const load = (file, lost) => {
    const script = document.createElement("script");
    script.src = `${encodeURIComponent(about.folder)}/${file}`;
    script.addEventListener("error", lost);
    script.addEventListener("load", () => script.remove());
    document.head.append(script);
  };
  const arrived = (number, chunk) => {
    if (chunk) {
      chunks.set(number, chunk);
      if (!about.chunks && chunks.size > KEPT) chunks.delete(chunks.keys().next().value);
    }
    for (const tell of waiting.get(number) ?? []) tell(chunk);
    waiting.delete(number);
  };
  const source = (at, show) => {
    const number = Math.floor(at / about.size);
    const tell = (chunk) => show(chunk ? chunk[at % about.size] : missing);
    if (chunks.has(number)) return tell(chunks.get(number));
    if (waiting.has(number)) return waiting.get(number).push(tell);
    waiting.set(number, [tell]);
    load(`pictures-${String(number).padStart(5, "0")}.js`, () => arrived(number, null));
  };
  window.qiePictures = arrived;
  window.qieFacts = (facts) => browse(place, facts, source);
  if (about.facts) window.qieFacts(about.facts);
  else {
    const lost = `All ${about.rows.toLocaleString("en")} rows are in the folder ${about.folder}, which belongs beside this page.`;
    load("facts.js", () => place.prepend(element("p", "verdict bad", lost)));
  }
}
