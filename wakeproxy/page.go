package wakeproxy

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"net/http"
)

// The pages stand alone: no outside resource, one style and one script, which
// their Content-Security-Policy names by hash. They say nothing about the
// sandbox but that it wakes.
var (
	//go:embed page.css
	pageStyle string
	//go:embed waiting.js
	waitingScript string
	//go:embed waiting.html
	waitingSource string
	//go:embed problem.html
	problemSource string

	waitingPage     = renderWaitingPage()
	problemTemplate = template.Must(template.New("problem").Parse(problemSource))

	waitingPolicy = "default-src 'none'; style-src '" + hashOf(pageStyle) + "'; script-src '" + hashOf(waitingScript) +
		"'; connect-src 'self'; base-uri 'none'; form-action 'none'"
	problemPolicy = "default-src 'none'; style-src '" + hashOf(pageStyle) + "'; base-uri 'none'; form-action 'none'"
)

func renderWaitingPage() []byte {
	var b bytes.Buffer
	t := template.Must(template.New("waiting").Parse(waitingSource))
	err := t.Execute(&b, map[string]any{
		"Style":    template.CSS(pageStyle),
		"Script":   template.JS(waitingScript),
		"WakePath": WakePath,
	})
	if err != nil {
		panic(err) // a mistake in our own template
	}
	return b.Bytes()
}

// hashOf is the CSP source expression of an inline style or script.
func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// writeWaitingPage answers a browser that would wait too long to stare at
// nothing. The page asks WakePath and reloads itself.
func writeWaitingPage(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	w.Header().Set("Content-Security-Policy", waitingPolicy)
	writeOwn(w, "text/html; charset=utf-8", http.StatusServiceUnavailable, waitingPage)
}

func writeProblemPage(w http.ResponseWriter, p problem) {
	var b bytes.Buffer
	err := problemTemplate.Execute(&b, map[string]any{"Style": template.CSS(pageStyle), "Problem": p})
	if err != nil {
		panic(err) // a mistake in our own template
	}
	w.Header().Set("Content-Security-Policy", problemPolicy)
	writeOwn(w, "text/html; charset=utf-8", p.Status, b.Bytes())
}
