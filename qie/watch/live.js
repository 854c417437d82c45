"use strict";
// The page polls, and replaces the parts that changed. Without this script it says what was so when it was loaded.

const EVERY_MS = 2000;
const parts = document.getElementById("parts");
let timer = null;

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

const shown = new Map();

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
    if (shown.get(name) === html) continue;
    shown.set(name, html);
    const open = new Set([...part.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    part.innerHTML = html; // made by the server, which escapes whatever a file says; the policy runs no script in it
    for (const one of part.querySelectorAll("details")) one.open ||= open.has(one.dataset.name);
  }
};

const poll = async () => {
  clearTimeout(timer);
  if (document.hidden) return; // until someone looks
  try {
    const answer = await fetch("parts.json");
    if (!answer.ok) throw new Error(answer.status);
    const found = await answer.json();
    document.title = found.title;
    replace(found.parts);
    link("");
  } catch {
    link("No answer from qie watch: these are the last figures. Is it still running?");
  }
  timer = setTimeout(poll, EVERY_MS);
};

document.addEventListener("visibilitychange", poll);
poll();

const act = async (button) => {
  if (button.dataset.ask && !confirm(button.dataset.ask)) return;
  button.disabled = true;
  try {
    const body = JSON.stringify({ action: button.dataset.do, values: JSON.parse(button.dataset.values) });
    const answer = await fetch("do", { method: "POST", headers: { "content-type": "application/json" }, body });
    const found = await answer.json().catch(() => ({ error: `qie watch answered ${answer.status}` }));
    said(found.said ?? found.error, !answer.ok);
  } catch {
    said("No answer from qie watch.", true);
  }
  button.disabled = false;
  poll();
};

const copy = (button) => {
  const code = button.parentElement.querySelector("code");
  const done = () => {
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  getSelection().selectAllChildren(code);
  const older = () => document.execCommand("copy") && done(); // a page that is not of this machine has no clipboard
  if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, older);
  else older();
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.do !== undefined) act(button);
  else if (button?.dataset.copy !== undefined) copy(button);
});
