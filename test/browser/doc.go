// Package browser opens previews and terminals in a real browser: it has tests only.
package browser
