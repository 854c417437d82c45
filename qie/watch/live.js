"use strict";
// The page polls, and replaces the parts that changed. Without this script it says what was so when it was loaded.

const EVERY_MS = 2000;
const parts = document.getElementById("parts");

const said = (text, bad = false) => {
  const line = document.getElementById("said");
  line.textContent = text;
  line.className = bad ? "bad shown" : "shown";
  clearTimeout(line.timer);
  line.timer = setTimeout(() => (line.className = ""), bad ? 12000 : 5000);
};

const link = (text) => {
  const line = document.getElementById("link");
  if (line.textContent !== text) line.textContent = text;
  document.body.classList.toggle("lost", text !== "");
};

// Parts

const shown = new Map();
// Where somebody writes or holds a slider, nothing is replaced under the hand.
const busy = (part) => part.querySelector("[data-changed]") || (part.contains(document.activeElement) && document.activeElement.matches("input, textarea"));

const replace = (found) => {
  for (const old of [...parts.children]) if (!(old.dataset.part in found)) old.remove();
  let before = null;
  for (const [name, html] of Object.entries(found)) {
    let part = [...parts.children].find((one) => one.dataset.part === name);
    if (!part) {
      part = document.createElement("div");
      part.dataset.part = name;
      if (before) before.after(part);
      else parts.prepend(part);
    }
    before = part;
    if (shown.get(name) === html || busy(part)) continue;
    shown.set(name, html);
    const open = new Set([...part.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    const places = [...part.querySelectorAll(".long, .wide")].map((one) => [one.scrollLeft, one.scrollTop]);
    const step = chosen(part);
    const focus = part.contains(document.activeElement) ? document.activeElement.textContent : null;
    part.innerHTML = html; // made by the server, which escapes whatever a file says; the policy runs no script in it
    for (const one of part.querySelectorAll("details")) one.open ||= open.has(one.dataset.name);
    [...part.querySelectorAll(".long, .wide")].forEach((one, at) => ([one.scrollLeft, one.scrollTop] = places[at] ?? [0, 0]));
    if (step !== null) show(part, step);
    if (focus) [...part.querySelectorAll("button, summary")].find((one) => one.textContent === focus)?.focus();
  }
};

let timer = null;
let polling = null;
let mark = "";

const poll = () => (polling ??= look().finally(() => (polling = null)));

const look = async () => {
  clearTimeout(timer);
  if (document.hidden) return; // until somebody looks
  try {
    const answer = await fetch("parts.json", { headers: mark ? { "if-none-match": mark } : {} });
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(answer.status);
      const found = await answer.json();
      document.title = found.title;
      replace(found.parts);
      mark = parts.querySelector("[data-changed]") ? "" : (answer.headers.get("etag") ?? "");
    }
    link("");
  } catch {
    link("No answer from qie watch: these are the last figures. Does it still run?");
  }
  timer = setTimeout(poll, EVERY_MS);
};

document.addEventListener("visibilitychange", poll);
poll();

// Pictures by step

const chosen = (part) => {
  const slider = part.querySelector("[data-slider]");
  return !slider || slider.value === slider.max ? null : Number(steps(part)[slider.value]);
};

const steps = (part) => part.querySelector("[data-steps]").dataset.steps.split(" ");

const show = (part, step) => {
  const slider = part.querySelector("[data-slider]");
  if (!slider) return;
  const all = steps(part).map(Number);
  const at = Math.max(all.findLastIndex((one) => one <= step), 0);
  slider.value = at;
  part.querySelector("output").textContent = `step ${all[at].toLocaleString("en")}`;
  for (const figure of part.querySelectorAll("[data-by-step]")) {
    const own = figure.dataset.byStep.split(" ").map(Number);
    const last = own.findLast((one) => one <= all[at]);
    figure.hidden = last === undefined;
    if (last === undefined) continue;
    const named = (address) => address.replace(/step-\d+-/, `step-${String(last).padStart(6, "0")}-`);
    const image = figure.querySelector("img");
    const to = named(image.getAttribute("src"));
    if (to !== image.getAttribute("src")) image.src = to;
    figure.querySelector("a").setAttribute("href", named(figure.querySelector("a").getAttribute("href")));
    figure.querySelector("figcaption span").textContent = image.alt = `step ${last.toLocaleString("en")}`;
  }
};

document.addEventListener("input", (event) => {
  if (event.target.dataset.slider !== undefined) {
    const part = event.target.closest("[data-part]");
    show(part, Number(steps(part)[event.target.value]));
  } else event.target.closest("[data-sample]")?.setAttribute("data-changed", "");
});
document.addEventListener("change", (event) => event.target.dataset.slider !== undefined && event.target.blur());

// Buttons

const post = async (button, action, values) => {
  button.disabled = true;
  let done = false;
  try {
    const body = JSON.stringify({ action, values });
    const answer = await fetch("do", { method: "POST", headers: { "content-type": "application/json" }, body });
    const found = await answer.json().catch(() => ({ error: `qie watch answered ${answer.status}` }));
    said(found.said ?? found.error, !answer.ok);
    done = answer.ok;
  } catch {
    said("No answer from qie watch.", true);
  }
  button.disabled = false;
  return done;
};

const act = async (button) => {
  if (button.dataset.ask && !confirm(button.dataset.ask)) return;
  await post(button, button.dataset.do, JSON.parse(button.dataset.values));
  await polling;
  poll();
};

const send = async (button) => {
  const form = button.closest("details");
  const samples = [...form.querySelectorAll("[data-sample]")].map((one) => ({
    prompt: one.querySelector("[name=prompt]").value,
    images: one.querySelector("[name=images]").value,
    seed: Number(one.querySelector("[name=seed]").value),
  }));
  if (!(await post(button, button.dataset.form, { samples }))) return;
  for (const one of form.querySelectorAll("[data-changed]")) one.removeAttribute("data-changed");
  form.open = false;
};

const copy = (button) => {
  const code = button.parentElement.querySelector("code");
  const done = () => {
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  const text = button.dataset.copy || code.textContent;
  if (text === code.textContent) getSelection().selectAllChildren(code);
  // A page that is not of this machine has no clipboard; the older way copies what is selected.
  const older = () => {
    const put = (event) => (event.clipboardData.setData("text/plain", text), event.preventDefault());
    document.addEventListener("copy", put, { once: true });
    if (document.execCommand("copy")) done();
    else document.removeEventListener("copy", put);
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, older);
  else older();
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.do !== undefined) act(button);
  else if (button?.dataset.form !== undefined) send(button);
  else if (button?.dataset.copy !== undefined) copy(button);
});

// Numbers under the pointer

const box = document.createElement("div");
box.className = "found";
box.hidden = true;
document.body.append(box);
const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
rule.setAttribute("class", "rule");

const leave = () => {
  box.hidden = true;
  rule.remove();
};

document.addEventListener("pointermove", (event) => {
  const drawing = event.target.closest?.("svg[data-found]");
  if (!drawing) return leave();
  const curves = JSON.parse(drawing.dataset.found);
  const view = drawing.viewBox.baseVal;
  const place = drawing.getBoundingClientRect();
  const x = ((event.clientX - place.left) / place.width) * view.width;
  const nearest = (curve) => curve.x.reduce((best, one, at) => (Math.abs(one - x) < Math.abs(curve.x[best] - x) ? at : best), 0);
  const first = curves.reduce((best, one) => (Math.abs(one.x[nearest(one)] - x) < Math.abs(best.x[nearest(best)] - x) ? one : best));
  const at = first.x[nearest(first)];
  for (const [name, value] of Object.entries({ x1: at, x2: at, y1: 12, y2: view.height - 40 })) rule.setAttribute(name, value);
  drawing.append(rule);
  const lines = curves.map((curve) => {
    const line = document.createElement("div");
    const number = nearest(curve);
    const key = document.createElement("span");
    key.className = `key k${curve.kind}`;
    line.append(...(curves.length > 1 ? [key] : []), `${curve.name ? curve.name + " " : ""}${curve.text[number] ?? "–"}`);
    return line;
  });
  const head = document.createElement("div");
  head.className = "soft";
  head.textContent = `step ${first.step[nearest(first)].toLocaleString("en")}`;
  box.replaceChildren(head, ...lines);
  box.hidden = false;
  const left = event.clientX + 16 + box.offsetWidth > innerWidth ? event.clientX - 16 - box.offsetWidth : event.clientX + 16;
  box.style.left = `${Math.max(left, 4)}px`;
  box.style.top = `${Math.min(event.clientY + 12, innerHeight - box.offsetHeight - 8)}px`;
});
document.addEventListener("scroll", leave, { passive: true });
