"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const toggle = document.getElementById("theme-toggle");
  const picker = document.getElementById("run-picker");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const printing = matchMedia("print");
  const isDark = () => root.dataset.theme === "dark";

  // ------------------------------------------------------------------------------------------------------- figures
  const resolveColours = (value, style) => {
    if (Array.isArray(value)) return value.map((item) => resolveColours(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolveColours(item, style)]));
    if (typeof value !== "string" || value[0] !== "@") return value;
    if (value.startsWith("@band:")) return style.getPropertyValue("--" + value.slice(6)).trim() + "2e";
    return style.getPropertyValue("--" + value.slice(1)).trim();
  };

  const drawFigure = (place) => {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    const figure = resolveColours(figures[place.id], style);
    const narrow = place.clientWidth < 480;
    const axis = (given) => ({
      gridcolor: colour("grid"), zeroline: false, linecolor: colour("line"), fixedrange: true, automargin: true, ...given,
      title: { ...given.title, font: { size: 13 }, standoff: 8 },
    });
    const ticks = figure.layout.yaxis.ticktext;
    if (narrow && ticks) figure.layout.yaxis.ticktext = ticks.map((name) => (name.length > 14 ? name.slice(0, 13) + "…" : name));
    const layout = {
      ...figure.layout, xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("soft") },
      margin: { l: 54, r: 14, t: 12, b: 46 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5 } },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("muted"), font: { color: colour("text") } },
    };
    return Plotly.react(place, figure.data, layout, { displayModeBar: false, responsive: true });
  };

  // Figures of hidden runs have no width, so they are drawn when their run is chosen.
  const drawVisible = () =>
    Promise.all([...document.querySelectorAll(".plot")].filter((place) => place.offsetParent).map(drawFigure));

  // --------------------------------------------------------------------------------------------------------- theme
  const showTheme = () => {
    toggle.setAttribute("aria-pressed", String(isDark()));
    return drawVisible();
  };
  if (!root.dataset.theme) root.dataset.theme = prefersDark.matches ? "dark" : "light";
  prefersDark.addEventListener("change", () => {
    let stored = null;
    try { stored = localStorage.getItem("fedauc-theme"); } catch (error) { /* no storage in this browser */ }
    if (!stored) { root.dataset.theme = prefersDark.matches ? "dark" : "light"; showTheme(); }
  });
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("fedauc-theme", root.dataset.theme); } catch (error) { /* no storage in this browser */ }
    showTheme();
  });

  // Paper is white: print in the light theme with everything unfolded, and go back afterwards.
  let beforePrint = null;
  addEventListener("beforeprint", () => {
    const folded = [...document.querySelectorAll("details:not([open])")];
    beforePrint = { theme: root.dataset.theme, folded };
    folded.forEach((details) => { details.open = true; });
    root.dataset.theme = "light";
    drawVisible();
  });
  addEventListener("afterprint", () => {
    if (!beforePrint) return;
    root.dataset.theme = beforePrint.theme;
    beforePrint.folded.forEach((details) => { details.open = false; });
    beforePrint = null;
    drawVisible();
  });

  // ---------------------------------------------------------------------------------------------------------- runs
  if (picker) picker.addEventListener("change", () => {
    document.querySelectorAll(".block[data-run]").forEach((block) => { block.hidden = block.dataset.run !== picker.value; });
    drawVisible();
  });

  // -------------------------------------------------------------------------------------------------------- tables
  const sortTable = (header) => {
    const row = header.parentElement, table = header.closest("table"), column = [...row.children].indexOf(header);
    const descending = header.getAttribute("aria-sort") === "ascending";
    [...row.children].forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (line) => {
      const cell = line.children[column];
      return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
    };
    const compare = (first, second) => {
      const a = key(first), b = key(second);
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
      return descending ? -order : order;
    };
    const body = table.tBodies[0];
    [...body.rows].sort(compare).forEach((line) => body.append(line));
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("table.sortable thead button");
    if (button) sortTable(button.closest("th"));
  });

  // ------------------------------------------------------------------------------------------------------ contents
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((section) => observer.observe(section));

  // ---------------------------------------------------------------------------------------------------------- live
  const updateText = (place, html) => {
    if (place.dataset.shown === html) return;
    // What the reader has unfolded or sorted stays so; a sorted table is sorted again.
    const open = new Set([...place.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    place.innerHTML = place.dataset.shown = html;
    place.querySelectorAll("details").forEach((details) => {
      details.open = open.has(details.querySelector("summary").textContent);
    });
  };
  const state = document.getElementById("live-state");
  let version = "";
  const askServer = async () => {
    try {
      const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
      state.textContent = "live";
      state.classList.remove("paused");
      if (answer.status === 200) {
        version = answer.headers.get("ETag") || "";
        const content = await answer.json();
        const same = (names, kind) => JSON.stringify(Object.keys(names).sort()) === JSON.stringify(kind.sort());
        const shown = [...document.querySelectorAll(".block-text")].map((place) => place.id.slice(0, -5));
        if (!same(content.figures, Object.keys(figures)) || !same(content.texts, shown)) return location.reload();
        for (const [key, html] of Object.entries(content.texts)) updateText(document.getElementById(key + "-text"), html);
        for (const [key, text] of Object.entries(content.summaries)) document.getElementById(key).setAttribute("aria-label", text);
        const changed = Object.keys(content.figures).filter((key) => JSON.stringify(content.figures[key]) !== JSON.stringify(figures[key]));
        Object.assign(figures, content.figures);
        changed.map((key) => document.getElementById(key)).filter((place) => place.offsetParent).forEach(drawFigure);
        if (content.finished) { state.textContent = "finished"; state.classList.add("paused"); return undefined; }
      }
    } catch (error) {
      state.textContent = "no connection";
      state.classList.add("paused");
    }
    return setTimeout(askServer, 1500);
  };

  // How long something has lasted is counted here, because the server's files change only when something happens.
  const formatDuration = (seconds) => {
    if (seconds < 60) return Math.floor(seconds) + " s";
    const minutes = Math.floor(seconds / 60);
    return minutes < 60 ? minutes + " min " + Math.floor(seconds % 60) + " s" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  };
  const countOn = () => document.querySelectorAll("[data-since]").forEach((place) => {
    place.textContent = formatDuration(Math.max(0, Date.now() / 1000 - Number(place.dataset.since)));
  });

  showTheme().then(() => {
    document.body.dataset.ready = "1";
    if (document.body.dataset.live) { setInterval(countOn, 1000); askServer(); }
  });
})();
