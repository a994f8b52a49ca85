/* Before anything is drawn: the theme that was chosen, so that the page does not flash. */
try {
  const theme = localStorage.getItem('mmserve.theme');
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
} catch {
  /* A browser without storage follows the system. */
}
