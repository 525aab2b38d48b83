// Typesets what pymdownx.arithmatex marks, and nothing else on the page.
window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    processEscapes: true,
    processEnvironments: true,
    tags: "ams",
  },
  svg: { fontCache: "global" },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
