// What the pages of `headrace ui` do by themselves: ask for parts that change, copy commands, and
// stop a run. Everything that is shown is made by the server; without this file a reload shows it.
"use strict";

const said = document.getElementById("said");
const TOKEN = "headrace-token";
let paused = false;
let silence = 0;

/** Say something in words, to eyes and to screen readers. */
function say(text) {
  said.textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { said.textContent = ""; }, 8000);
}

/** Return a button. */
function button(text, pressed) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", () => pressed(made));
  return made;
}

/** Return what is typed, marked, scrolled and focused in a part, to put it back afterwards. */
function held(part) {
  const active = document.activeElement;
  const focused = part.contains(active) ? keyOf(active) : null;
  const marked = [...part.querySelectorAll("input:checked")].map(keyOf);
  const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  const opened = [...part.querySelectorAll("details")].map((one) => one.open);
  return { focused, marked, scrolled, opened };
}

/** Return what names an element from one version of a part to the next. */
function keyOf(element) {
  const name = element.getAttribute("aria-label") || element.textContent;
  return `${element.tagName}|${element.getAttribute("href") || ""}|${element.value || ""}|${name}`;
}

function putBack(part, before) {
  for (const input of part.querySelectorAll("input")) {
    input.checked = before.marked.includes(keyOf(input));
  }
  part.querySelectorAll(".scroll").forEach((box, n) => { box.scrollLeft = before.scrolled[n] || 0; });
  part.querySelectorAll("details").forEach((one, n) => { one.open = Boolean(before.opened[n]); });
  if (before.focused !== null) {
    const all = [...part.querySelectorAll("a, button, input, summary, [tabindex]")];
    const same = all.find((one) => keyOf(one) === before.focused);
    if (same) same.focus({ preventScroll: true });
  }
}

/** Ask the server for a part of the page, and show it where it changed. */
async function refresh(part) {
  const headers = { "X-Part": "1" };
  if (part.dataset.known) headers["If-None-Match"] = part.dataset.known;
  let answer;
  try {
    answer = await fetch(part.dataset.live, { headers });
  } catch {
    if (!part.dataset.lost) say("The server does not answer. It was started by: headrace ui");
    part.dataset.lost = "1";
    return true;
  }
  if (part.dataset.lost) say("The server answers again.");
  delete part.dataset.lost;
  if (answer.status === 304) return true;
  if (answer.status === 410) {
    ended(part);
    return false;
  }
  if (!answer.ok) {
    say(await answer.text());
    return answer.status >= 500 || answer.status === 422;
  }
  const text = await answer.text();
  const before = held(part);
  part.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
  part.dataset.known = answer.headers.get("ETag") || "";
  dress(part);
  putBack(part, before);
  return true;
}

/** Say that a run has ended, with a link to its report. */
function ended(part) {
  const line = document.createElement("p");
  line.className = "verdict";
  line.append("The run has ended. ");
  const link = document.createElement("a");
  link.href = location.pathname;
  link.textContent = "Show its report";
  line.append(link);
  part.prepend(line);
  say("The run has ended.");
}

/** Keep a part of the page up to date. */
function follow(part) {
  const every = 1000 * Number(part.dataset.every);
  const turn = async () => {
    const again = paused || document.hidden || (await refresh(part));
    if (again) setTimeout(turn, every);
  };
  if (every) setTimeout(turn, part.dataset.now === undefined ? every : 0);
  else refresh(part);
}

/** Copy text, and say so. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser did not allow copying; select the command instead.");
  }
}

/** Give the commands in a part a button that copies them, and show buttons that need a token. */
function dress(part) {
  for (const box of part.querySelectorAll("pre.command")) {
    const around = document.createElement("div");
    around.className = "copied";
    box.replaceWith(around);
    const press = button("Copy", () => copy(box.textContent));
    press.setAttribute("aria-label", `Copy: ${box.textContent}`);
    around.append(box, press);
  }
  if (!sessionStorage.getItem(TOKEN)) return;
  for (const press of part.querySelectorAll("button[data-post]")) {
    press.hidden = false;
    press.addEventListener("click", () => post(press));
  }
}

/** Do what a button says, with the token. */
async function post(press) {
  if (!confirm(`${press.textContent}? It saves a checkpoint, and can be resumed.`)) return;
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(TOKEN)}` };
  try {
    const answer = await fetch(press.dataset.post, { method: "POST", headers });
    const told = await answer.json();
    say(told.said || told.error);
  } catch {
    say("The server does not answer.");
  }
}

/** Take the token out of the address, where it stands behind #token=. */
function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(TOKEN, found[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

takeToken();
dress(document);
const parts = [...document.querySelectorAll("[data-live]")];
if (parts.some((part) => Number(part.dataset.every))) {
  document.getElementById("tools").append(button("Pause updates", (press) => {
    paused = !paused;
    press.textContent = paused ? "Go on updating" : "Pause updates";
    say(paused ? "Updates are paused." : "The page is kept up to date.");
  }));
}
parts.forEach(follow);
