// Package browser opens previews in a real browser: it has tests only.
package browser
