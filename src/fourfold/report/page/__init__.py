"""Pages to look at, each one HTML file: plans and reproductions.

Enters: rankings, runs, reproductions. Leaves: HTML. Works out what is shown; `page.js` and `reproduction.js` draw it,
both with `drawing.js`.
"""
