// Before the first paint: the theme that was chosen here, else that of the system.
try {
  const theme = localStorage.getItem("kvgate-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be switched off; the system's theme serves.
}
