// The live page. It asks for itself once a second while it is seen; htmx morphs what changed into
// place, so that focus, selection and typed text stay. Everything works without this file as well.
(() => {
  "use strict";

  const TICK_MS = 1000;
  const TIMEOUT_MS = 4000;
  const BACKOFF_MAX_MS = 4000;

  const root = document.documentElement;
  const main = document.getElementById("main");
  const away = document.getElementById("away");
  let marks = main.dataset.parts;
  let paused = false;
  let failures = 0;
  let lost = null;
  let timer = 0;

  // ---- live update --------------------------------------------------------------------------

  function later(ms) {
    clearTimeout(timer);
    timer = setTimeout(tick, ms);
  }

  function tick() {
    if (paused || document.hidden) return;
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
    if (status === 401) location.reload();
    if (status !== 200 && status !== 204) {
      event.preventDefault();
      return;
    }
    const assets = headers.get("Kvgate-Assets");
    if (assets && assets !== root.dataset.assets) location.reload();
    ctx.kvgateMarks = headers.get("Kvgate-Parts");
  });

  main.addEventListener("htmx:finally:request", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement !== main) return;
    if (ctx.kvgateMarks) {
      marks = ctx.kvgateMarks;
      found();
      later(TICK_MS);
    } else {
      missed();
      // Spread out, so that not all pages come back in the same instant.
      const most = Math.min(BACKOFF_MAX_MS, TICK_MS * 2 ** failures);
      later(most / 2 + (Math.random() * most) / 2);
    }
  });

  function found() {
    failures = 0;
    lost = null;
    away.hidden = true;
    root.classList.remove("is-away");
  }

  function missed() {
    failures += 1;
    lost ??= new Date();
    away.textContent = `No connection since ${lost.toLocaleTimeString()}. The figures are from then; the page comes back by itself.`;
    away.hidden = false;
    root.classList.add("is-away");
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) later(0);
  });

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
