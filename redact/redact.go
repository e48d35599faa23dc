// Package redact removes confidential text from log lines: the tokens of previews, API
// keys, and input of clients and upstreams that a library quotes.
package redact

import (
	"regexp"
	"strings"
)

// mark stands for what was removed.
const mark = "…"

var (
	// previewToken follows the port and the id in the host name of a preview:
	// 3000-k3f9x2m7q1az-TOKEN. After it may come anything, so that a host name
	// that was cut or escaped is recognized too.
	previewToken = regexp.MustCompile(`(?i)\b([1-9][0-9]{0,4}-[a-z0-9]{12})-[a-z0-9]+`)
	apiKey       = regexp.MustCompile(`\bdoze_[A-Za-z0-9]{16,}`)
	query        = regexp.MustCompile(`\b((?:http|ws)s?://[^\s"?#]*)\?[^\s"]*`)
)

// Text returns s without tokens of previews, API keys and queries of URLs. The port and
// the id of the sandbox remain.
func Text(s string) string {
	if mayHavePreviewToken(s) {
		s = previewToken.ReplaceAllString(s, "$1-"+mark)
	}
	if strings.Contains(s, "doze_") {
		s = apiKey.ReplaceAllLiteralString(s, "doze_"+mark)
	}
	if strings.Contains(s, "://") {
		s = query.ReplaceAllString(s, "$1?"+mark)
	}
	return s
}

// mayHavePreviewToken reports whether previewToken can match in s: two hyphens are as far
// apart as those around the id of a sandbox. Each request of a preview is redacted, and
// the expression costs 9 % of the request's handler.
func mayHavePreviewToken(s string) bool {
	const idLength = 12
	for i := range len(s) - idLength - 1 {
		if s[i] == '-' && s[i+idLength+1] == '-' {
			return true
		}
	}
	return false
}
