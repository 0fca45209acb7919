// The live page. It asks for itself once a second while it is seen; htmx morphs what changed into
// place, so that focus, selection and typed text stay. Actions are confirmed in a dialog, and keys
// do what links and buttons do. Everything works without this file as well: it changes no data and
// makes no markup of its own.
(() => {
  "use strict";

  const TICK_MS = 1000;
  const TIMEOUT_MS = 3500;
  const BACKOFF_MAX_MS = 4000;
  const ACT_TIMEOUT_MS = 15000;
  const SEQUENCE_MS = 1200;

  const root = document.documentElement;
  const main = document.getElementById("main");
  const away = document.getElementById("away");
  const dialog = document.getElementById("dialog");
  const help = document.getElementById("help");
  let marks = main.dataset.parts;
  let held = false;
  let failures = 0;
  let lost = null;
  let timer = 0;

  // ---- live update --------------------------------------------------------------------------

  function later(ms) {
    clearTimeout(timer);
    timer = setTimeout(tick, ms);
  }

  function tick() {
    if (held || document.hidden) return;
    htmx.trigger(main, "kvgate:tick");
  }

  main.addEventListener("htmx:config:request", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement !== main) return;
    ctx.request.action = location.pathname + location.search;
    ctx.request.headers["Kvgate-Parts"] = marks;
    ctx.request.timeout = TIMEOUT_MS;
  });

  main.addEventListener("htmx:before:response", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement !== main) return;
    const { status, headers } = ctx.response;
    if (status !== 200 && status !== 204) {
      ctx.kvgateStatus = status;
      event.preventDefault();
      return;
    }
    // Another version of the service has other files. It can wait until nobody is in the middle of something.
    const assets = headers.get("Kvgate-Assets");
    if (assets && assets !== root.dataset.assets && !isBusy()) location.reload();
    ctx.kvgateMarks = headers.get("Kvgate-Parts");
  });

  main.addEventListener("htmx:finally:request", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement !== main) return;
    if (ctx.kvgateMarks) {
      marks = ctx.kvgateMarks;
      found();
      later(TICK_MS);
      return;
    }
    missed(ctx.kvgateStatus);
    // Spread out, so that not all pages come back in the same instant.
    const most = Math.min(BACKOFF_MAX_MS, TICK_MS * 2 ** failures);
    later(most / 2 + (Math.random() * most) / 2);
  });

  function found() {
    failures = 0;
    lost = null;
    away.hidden = true;
    root.classList.remove("is-away");
  }

  function missed(status) {
    failures += 1;
    lost ??= new Date();
    if (status === 401 && !isBusy()) location.reload();
    const text = why(status);
    // A text that is said again and again would be read aloud again and again.
    if (away.textContent !== text) away.textContent = text;
    away.hidden = false;
    root.classList.add("is-away");
  }

  function why(status) {
    const since = lost.toLocaleTimeString();
    if (status === 401) return `The log-in ended at ${since}. Load the page anew to log in.`;
    if (status === 404 || status === 410) return `What this page shows is no longer known since ${since}. These are its last figures.`;
    if (status === undefined) return `No connection since ${since}. The figures are from then; the page comes back by itself.`;
    return `No figures since ${since}: the service answers ${status}. The page comes back by itself.`;
  }

  /** Whether a dialog is open, or a text was typed or a box ticked that a new page would lose. */
  function isBusy() {
    if (document.querySelector("dialog[open]")) return true;
    const fields = [...document.querySelectorAll("input, textarea, select")];
    return fields.some((field) => {
      if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
      if (field.tagName === "SELECT") return field.selectedIndex !== Math.max(0, [...field.options].findIndex((one) => one.defaultSelected));
      return field.type !== "hidden" && field.value !== field.defaultValue;
    });
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) later(0);
  });

  // While a form is being filled in, an update leaves it alone.
  document.addEventListener("input", (event) => {
    event.target.closest("[data-keep]")?.setAttribute("hx-morph-skip", "");
  });
  document.addEventListener("reset", () => letGo());

  function letGo() {
    for (const kept of document.querySelectorAll("[hx-morph-skip]")) kept.removeAttribute("hx-morph-skip");
    // What was left alone may have changed meanwhile: everything is asked for once more.
    marks = "";
    later(0);
  }

  function hold(on) {
    held = on;
    root.classList.toggle("is-held", on);
    if (!on) later(0);
  }

  // ---- actions ------------------------------------------------------------------------------

  // A link or a form that leads to a confirmation shows it in the dialog instead.
  document.addEventListener("click", (event) => {
    const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
    const link = event.target.closest("a[data-dialog]");
    if (link && plain) {
      event.preventDefault();
      show(link.href, { method: "GET" });
    }
    if (event.target.closest("[data-close]")) {
      const open = event.target.closest("dialog");
      if (open) {
        event.preventDefault();
        open.close();
      }
    }
    // A click beside a dialog.
    if (event.target === dialog || event.target === help) event.target.close();
    if (event.target.closest("#held")) hold(false);
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    const acts = form.closest("dialog");
    if (!acts && !form.hasAttribute("data-dialog")) return;
    event.preventDefault();
    const fields = new URLSearchParams(new FormData(form, event.submitter));
    const action = event.submitter?.getAttribute("formaction") ?? form.getAttribute("action");
    const url = new URL(action, document.baseURI);
    if (form.method === "post") {
      show(url, { method: "POST", body: fields });
    } else {
      url.search = fields;
      show(url, { method: "GET" });
    }
  });

  /** Asks for a page and shows what it says in the dialog. An act leads back to a page: then it is done. */
  async function show(url, request) {
    const pressed = dialog.querySelector("button[type=submit]");
    if (pressed) pressed.disabled = true;
    let answer;
    let text;
    try {
      answer = await fetch(url, { ...request, signal: AbortSignal.timeout(ACT_TIMEOUT_MS) });
      text = await answer.text();
    } catch {
      say("No connection", "The service did not answer, and it is not known whether it did what was asked. Look at the page before you try again.");
      return;
    }
    // What the page shows may be gone by the act: it was done all the same.
    if (answer.redirected) {
      done(new URL(answer.url));
      return;
    }
    const page = new DOMParser().parseFromString(text, "text/html");
    const found = page.querySelector("#confirm, .sheet");
    if (!found) {
      say("Not done", `The service answers ${answer.status}.`);
      return;
    }
    // In the dialog there is a page around it already.
    for (const heading of found.querySelectorAll("h1")) {
      const smaller = document.createElement("h2");
      smaller.append(...heading.childNodes);
      heading.replaceWith(smaller);
    }
    for (const back of found.querySelectorAll("input[name=back]")) back.value = here();
    open([...found.childNodes]);
  }

  function say(title, text) {
    const heading = document.createElement("h2");
    heading.textContent = title;
    const sentence = document.createElement("p");
    sentence.textContent = text;
    open([heading, sentence]);
  }

  function open(nodes) {
    dialog.querySelector(".body").replaceChildren(...nodes.map((node) => document.importNode(node, true)));
    if (!dialog.open) dialog.showModal();
    const first = dialog.querySelector("[autofocus], input:not([type=hidden]), button[type=submit], [data-close]");
    first?.focus();
  }

  /** The page that is looked at, as a relative address. */
  function here() {
    const name = location.pathname.split("/").pop() || "./";
    const query = new URLSearchParams(location.search);
    query.delete("told");
    return query.size ? `${name}?${query}` : name;
  }

  function done(url) {
    dialog.close();
    for (const box of document.querySelectorAll("[data-select]:checked, [data-select-all]:checked")) box.checked = false;
    count();
    if (url.pathname !== location.pathname) {
      location.assign(url);
      return;
    }
    history.replaceState(null, "", url);
    letGo();
  }

  // The element that opened the dialog gets the focus back, which the browser does; it may be gone.
  dialog.addEventListener("close", () => {
    dialog.querySelector(".body").replaceChildren();
    if (document.activeElement === document.body) main.focus({ preventScroll: true });
  });

  // ---- selection ----------------------------------------------------------------------------

  document.addEventListener("change", (event) => {
    const all = event.target.closest("[data-select-all]");
    if (all) {
      const table = all.closest("table") ?? document;
      for (const box of table.querySelectorAll("[data-select]")) box.checked = all.checked;
    }
    if (all || event.target.closest("[data-select]")) count();
  });

  function count() {
    const chosen = document.querySelectorAll("[data-select]:checked").length;
    root.classList.toggle("has-chosen", chosen > 0);
    for (const shown of document.querySelectorAll("[data-count]")) shown.textContent = String(chosen);
  }
  // An update may have taken chosen rows away, and it brings the number anew.
  main.addEventListener("htmx:after:swap", count);

  // ---- keys ---------------------------------------------------------------------------------

  let sequence = 0;
  let place = -1;

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const inSequence = event.timeStamp < sequence;
    sequence = 0;
    const act = inSequence ? goTo(event.key) : keys[event.key];
    if (!act) return;
    if (act(event) !== false) event.preventDefault();
  });

  /** Text goes into such a field; a box is ticked by the space bar only, so that keys work beside it. */
  function isTyping(element) {
    if (element.isContentEditable || element.matches("textarea, select")) return true;
    return element.matches("input") && !["checkbox", "radio", "button", "submit"].includes(element.type);
  }

  function goTo(key) {
    const link = document.querySelector(`nav a[aria-keyshortcuts="g ${CSS.escape(key)}"]`);
    return link && (() => link.click());
  }

  const keys = {
    g: (event) => {
      sequence = event.timeStamp + SEQUENCE_MS;
    },
    j: () => move(1),
    k: () => move(-1),
    Enter: (event) => {
      // A link or a button that has the focus does what it does.
      if (event.target.closest("a, button, summary, input")) return false;
      const row = current();
      if (!row) return false;
      location.assign(new URL(row.dataset.row, document.baseURI));
    },
    x: () => current()?.querySelector("[data-select]")?.click(),
    c: () => press("c"),
    r: () => press("r"),
    ".": () => hold(!held),
    "/": () => document.getElementById("search")?.focus(),
    "?": () => help.showModal(),
  };

  const rows = () => [...main.querySelectorAll("[data-row]")];
  const current = () => main.querySelector("[data-row][data-cur]");

  function move(by) {
    const all = rows();
    if (!all.length) return;
    // A row that went with an update leaves its place.
    const at = all.indexOf(current());
    const next = at >= 0 ? at + by : by > 0 ? Math.max(place, 0) : place - 1;
    place = Math.min(Math.max(next, 0), all.length - 1);
    current()?.removeAttribute("data-cur");
    const row = all[place];
    row.setAttribute("data-cur", "");
    row.querySelector("a")?.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  /** The button for all chosen rows, else what the row itself offers. */
  function press(key) {
    const chosen = document.querySelector("[data-select]:checked");
    const button = chosen && document.querySelector(`button[data-key="${key}"]`);
    const target = button ?? current()?.querySelector(`[data-key="${key}"]`);
    target?.click();
  }

  // ---- theme --------------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem("kvgate-theme", root.dataset.theme);
    } catch {
      // It holds for this page then.
    }
  });

  later(TICK_MS);
})();
