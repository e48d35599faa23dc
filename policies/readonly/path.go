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
// anything. Its time is at most the product of their lengths: a path cannot make it long.
func matches(glob, path string) bool {
	// reached[i]: the glob so far matches the first i characters of the path.
	reached := make([]bool, len(path)+1)
	reached[0] = true
	for g, c := range []byte(glob) {
		if c != '*' {
			for i := len(path); i > 0; i-- {
				reached[i] = reached[i-1] && path[i-1] == c
			}
			reached[0] = false
			continue
		}
		for i := range len(path) {
			if reached[i] && (path[i] != '/' || double(glob, g)) {
				reached[i+1] = true // the star takes one more
			}
		}
	}
	return reached[len(path)]
}

// double reports whether the star at g is part of **.
func double(glob string, g int) bool {
	return g > 0 && glob[g-1] == '*' || g+1 < len(glob) && glob[g+1] == '*'
}
