package wakeproxy

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"maps"
	"net/http"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
)

// The pages are self-contained: no external resource, one style and one script,
// which their Content-Security-Policy names by hash. They name neither the sandbox
// nor the node.
var (
	//go:embed page.css
	pageStyle string
	//go:embed page.js
	pageScript string
	//go:embed waiting.html
	waitingSource string
	//go:embed problem.html
	problemSource string

	waitingPage = render(template.Must(template.New("waiting").Parse(waitingSource)), map[string]any{
		"Style": template.CSS(pageStyle), "Script": template.JS(pageScript), "WakePath": WakePath, "StatusPath": StatusPath,
	})
	problemTemplate = template.Must(template.New("problem").Parse(problemSource))

	pagePolicy = "default-src 'none'; style-src '" + hashOf(pageStyle) + "'; script-src '" + hashOf(pageScript) +
		"'; connect-src 'self'; base-uri 'none'; form-action 'none'"
)

func render(page *template.Template, values map[string]any) []byte {
	var b bytes.Buffer
	if err := page.Execute(&b, values); err != nil {
		panic(err) // a mistake in our own template
	}
	return b.Bytes()
}

// hashOf is the CSP source expression of an inline style or script.
func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// writeWaitingPage responds to a browser that has waited for WaitingPageAfter. The
// page requests WakePath and reloads itself.
func writeWaitingPage(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	writePage(w, http.StatusServiceUnavailable, waitingPage)
}

func writePage(w http.ResponseWriter, status int, page []byte) {
	w.Header().Set("Content-Security-Policy", pagePolicy)
	w.Header().Set("Vary", varies)
	writeOwn(w, "text/html; charset=utf-8", status, page)
}

// writeProblemPage responds to a browser with a problem. The page of a temporary
// problem has a button that tries again, and loads the page again when the server
// listens, if the request can be repeated.
func writeProblemPage(w http.ResponseWriter, r *http.Request, p *problem.Problem) {
	values := map[string]any{"Style": template.CSS(pageStyle), "Problem": p}
	if mayPass(p) {
		values["Button"] = "Try again"
		if p.Code == problem.SandboxStopped {
			values["Button"] = "Start the sandbox"
		}
		if r.Method == http.MethodGet {
			values["StatusPath"], values["Script"] = StatusPath, template.JS(pageScript)
		}
	}
	maps.Copy(w.Header(), p.GetHeaders())
	w.Header().Set(requestid.Header, p.RequestID)
	writePage(w, p.Status, render(problemTemplate, values))
}
