package rule

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// A path can be read in several ways: servers differ in what they decode, merge
// and cut off, and in which order. If a rule matches some readings only, its match is unsure.

// maxReadings bounds the work for a path.
const maxReadings = 24 // three decodings, each with or without three changes

// readings returns the ways in which a server might read a path as it was sent.
// None means that there are too many to be sure of any: it has dot segments,
// which servers resolve before or after all the rest, or is invalid.
func readings(sent string) []string {
	if sent == "*" { // OPTIONS *
		return []string{sent}
	}
	once, err := url.PathUnescape(sent)
	if err != nil || !strings.HasPrefix(sent, "/") || strings.ContainsFunc(once, unicode.IsControl) {
		return nil
	}
	if once == sent && !strings.ContainsAny(sent, `\;`) && !strings.Contains(sent, "//") && !strings.Contains(sent, "/.") {
		return []string{once} // almost always
	}
	all := make([]string, 0, maxReadings)
	for _, p := range []string{decodeNames(sent), once, decodeNames(once), unescape(once)} {
		for _, p := range []string{p, strings.ReplaceAll(p, `\`, "/")} {
			for _, p := range []string{p, parameters.ReplaceAllString(p, "")} {
				if hasDots(p) {
					return nil
				}
				for _, p := range []string{p, slashes.ReplaceAllString(p, "/")} {
					if !slices.Contains(all, p) {
						all = append(all, p)
					}
				}
			}
		}
	}
	return all
}

// unescape decodes what can be decoded, as a lenient server does.
func unescape(p string) string {
	if u, err := url.PathUnescape(p); err == nil {
		return u
	}
	return p
}

// decodeNames decodes all but the slashes that are part of a name.
func decodeNames(p string) string {
	parts := escapedSlash.Split(p, -1)
	for i := range parts {
		parts[i] = unescape(parts[i])
	}
	return strings.Join(parts, "%2F")
}

var (
	escapedSlash = regexp.MustCompile(`%2[fF]`)
	slashes      = regexp.MustCompile(`//+`)
	parameters   = regexp.MustCompile(`;[^/]*`) // such as ;jsessionid=1
)

func hasDots(p string) bool {
	for segment := range strings.SplitSeq(p, "/") {
		if segment == "." || segment == ".." {
			return true
		}
	}
	return false
}
