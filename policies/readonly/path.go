package main

import (
	"net/url"
	"strings"
)

// readPath decodes a path, and reports whether every server would read it so: some
// resolve dots, merge slashes, cut off parameters or decode twice, others do not.
func readPath(sent string) (path string, plain bool) {
	path, err := url.PathUnescape(sent)
	if err != nil || !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "%\\;\x00") {
		return path, false
	}
	if strings.Contains(path, "//") || strings.Count(path, "/") != strings.Count(sent, "/") {
		return path, false
	}
	for part := range strings.SplitSeq(path, "/") {
		if part == "." || part == ".." {
			return path, false
		}
	}
	return path, true
}

// matches reports whether a glob matches all of path: * is anything but a slash, **
// anything. Its time is at most the product of their lengths, for each kind of
// star: a path cannot make it long.
func matches(glob, path string) bool {
	// state[i]: the glob's first i characters match the path so far.
	state := make([]bool, len(glob)+1)
	state[0] = true
	stars(glob, state)
	for i := range len(path) {
		next := make([]bool, len(glob)+1)
		for g := range len(glob) {
			switch {
			case glob[g] != '*':
				next[g+1] = next[g+1] || state[g] && glob[g] == path[i]
			case double(glob, g) || path[i] != '/':
				next[g+1] = next[g+1] || state[g+1] // the star takes one more
			}
		}
		stars(glob, next)
		state = next
	}
	return state[len(glob)]
}

// stars lets stars match nothing.
func stars(glob string, state []bool) {
	for g := range len(glob) {
		if glob[g] == '*' && state[g] {
			state[g+1] = true
		}
	}
}

// double reports whether the star at g is part of **.
func double(glob string, g int) bool {
	return g > 0 && glob[g-1] == '*' || g+1 < len(glob) && glob[g+1] == '*'
}
