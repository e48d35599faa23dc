package rule

import (
	"net/url"
	"path"
	"regexp"
	"strings"
)

// A path can be read in several ways: as it was sent, and as a server reads it
// that removes `..`, doubled slashes, or backslashes. A rule that forbids matches
// if any reading does, one that permits only if all do, so that no spelling of a
// path gets around either.

// readings returns the ways in which a server might read a path. ok is false if
// it is no path that a rule could be sure of: then no rule permits it.
func readings(sent string) (all []string, ok bool) {
	if sent == "*" { // OPTIONS *
		return []string{sent}, true
	}
	if !strings.HasPrefix(sent, "/") {
		return nil, false
	}
	decoded, err := url.PathUnescape(sent)
	if err != nil {
		return nil, false
	}
	for _, c := range []byte(decoded) {
		if c < ' ' || c == 0x7f {
			return nil, false
		}
	}
	add := func(p string) {
		for _, other := range all {
			if other == p {
				return
			}
		}
		all = append(all, p)
	}
	add(decoded)
	if simple(decoded) && !strings.Contains(sent, "%") {
		return all, true
	}
	add(sent) // escapes left alone, as %2F in a name often is
	add(clean(decoded))
	add(clean(strings.ReplaceAll(decoded, `\`, "/")))
	if twice, err := url.PathUnescape(decoded); err == nil && twice != decoded {
		add(twice)
		add(clean(twice))
	}
	return all, true
}

// simple says that a decoded path reads the same to every server.
func simple(p string) bool {
	return !strings.Contains(p, "//") && !strings.Contains(p, "/.") && !strings.ContainsAny(p, `\%;`)
}

// clean removes what a server might: dot segments, doubled slashes, and
// parameters of segments (`;jsessionid=…`). A slash at the end stays.
func clean(p string) string {
	if strings.Contains(p, ";") {
		segments := strings.Split(p, "/")
		for i, s := range segments {
			segments[i], _, _ = strings.Cut(s, ";")
		}
		p = strings.Join(segments, "/")
	}
	c := path.Clean(p)
	if strings.HasSuffix(p, "/") && c != "/" {
		c += "/"
	}
	return c
}

// globOf compiles a pattern in which `**` is anything, and `*` anything but sep.
// The library's matcher needs time linear in the text, whatever it holds.
func globOf(pattern string, sep string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`\A(?s:`)
	for rest := pattern; rest != ""; {
		literal, after, found := strings.Cut(rest, "*")
		b.WriteString(regexp.QuoteMeta(literal))
		if !found {
			break
		}
		rest = strings.TrimLeft(after, "*")
		if sep == "" || strings.HasPrefix(after, "*") {
			b.WriteString(`.*`)
		} else {
			b.WriteString(`[^` + regexp.QuoteMeta(sep) + `]*`)
		}
	}
	b.WriteString(`)\z`)
	return regexp.MustCompile(b.String())
}
