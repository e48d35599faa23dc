package wakeproxy

import (
	"net/http"
	"slices"
	"strings"

	"github.com/doze-run/doze/runtime/sandbox"
)

// reach is the set of states from which a request may wake a sandbox.
// docs/reference/caddyfile.md has it as a table.
type reach int

const (
	reachRunning reach = iota // none: it is served while the sandbox is running
	reachAsleep               // one that is asleep
	reachStopped              // also one that is stopped
)

// reachOf decides by the port's mode, and in WakeNavigation by the kind of request:
// people and programs start a stopped sandbox, background requests of
// browsers and crawlers do not. Otherwise an open tab would undo every stop.
func reachOf(r *http.Request, mode sandbox.WakeMode) reach {
	switch {
	case mode == sandbox.WakeNever:
		return reachRunning
	case mode == sandbox.WakeAny:
		return reachStopped
	case isPrefetch(r), isRobots(r):
		return reachRunning
	case isBackground(r), r.Method == http.MethodHead, isCrawlerPath(r.URL.Path), isCrawler(r.UserAgent()):
		return reachAsleep
	}
	return reachStopped
}

// isPrefetch reports whether a browser loads a page before its user opens it:
// https://developer.mozilla.org/docs/Web/HTTP/Reference/Headers/Sec-Purpose and
// the older headers of Chrome and Safari (Purpose, X-Purpose) and Firefox (X-Moz).
func isPrefetch(r *http.Request) bool {
	for _, name := range [...]string{"Sec-Purpose", "Purpose", "X-Purpose", "X-Moz"} {
		switch purpose, _, _ := strings.Cut(r.Header.Get(name), ";"); lowerASCII(strings.TrimSpace(purpose)) {
		case "prefetch", "preview":
			return true
		}
	}
	return false
}

// isBackground reports whether an open page makes the request: a resource, a fetch,
// an event stream, a WebSocket, of its own origin or of another.
func isBackground(r *http.Request) bool {
	// Sec-Fetch-Mode alone is not a browser: Node's fetch sends it.
	browser := r.Header.Get("Sec-Fetch-Site") != "" || r.Header.Get("Sec-Fetch-Dest") != ""
	switch {
	case isWebSocket(r):
		return browser || r.Header.Get("Origin") != ""
	case browser:
		return r.Header.Get("Sec-Fetch-Mode") != "navigate"
	case strings.HasPrefix(r.UserAgent(), "Mozilla/"):
		// A browser without Fetch Metadata, as over HTTP without TLS and in
		// Safari before 16.4: only navigations accept HTML.
		return !wantsHTML(r)
	}
	return false
}

// isWebSocket reports whether a request opens a WebSocket: by an upgrade, or by
// an extended CONNECT (RFC 8441, RFC 9220), whose protocol Go has in the header.
func isWebSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket") ||
		r.Method == http.MethodConnect && len(r.Header[":protocol"]) > 0
}

// crawlerPaths are requested by browsers and crawlers without a link to them. The
// rest of /.well-known/ wakes: clients of OAuth and MCP begin there.
var crawlerPaths = map[string]bool{
	"/favicon.ico":       true,
	"/sitemap.xml":       true,
	"/ads.txt":           true,
	"/app-ads.txt":       true,
	"/security.txt":      true,
	"/browserconfig.xml": true,
	"/.well-known/apple-app-site-association":           true,
	"/.well-known/appspecific/com.chrome.devtools.json": true,
	"/.well-known/assetlinks.json":                      true,
	"/.well-known/change-password":                      true,
	"/.well-known/dnt-policy.txt":                       true,
	"/.well-known/gpc.json":                             true,
	"/.well-known/passkey-endpoints":                    true,
	"/.well-known/security.txt":                         true,
	"/.well-known/traffic-advice":                       true,
}

func isCrawlerPath(path string) bool {
	return crawlerPaths[path] || strings.HasPrefix(path, "/apple-touch-icon")
}

// crawlers are words in the User-Agent of programs that show previews of links in
// chats, index the web or collect it. Programs that fetch an address at a person's
// request (ChatGPT-User, Claude-User) are not among them.
var crawlers = []string{
	"facebookexternalhit", "facebot", "twitterbot", "slackbot", "slack-imgproxy", "discordbot", "telegrambot", "whatsapp",
	"linkedinbot", "skypeuripreview", "redditbot", "pinterestbot", "mastodon", "cardyb", "embedly", "iframely", "vkshare",
	"googlebot", "google-inspectiontool", "bingbot", "bingpreview", "applebot", "yandexbot", "baiduspider", "duckduckbot",
	"ahrefsbot", "semrushbot", "mj12bot", "petalbot", "gptbot", "claudebot", "ccbot", "bytespider", "amazonbot", "perplexitybot",
}

// maxUserAgent bounds the search for crawlers; theirs have at most 300 bytes.
const maxUserAgent = 1024

func isCrawler(agent string) bool {
	agent = lowerASCII(agent[:min(len(agent), maxUserAgent)])
	return slices.ContainsFunc(crawlers, func(word string) bool { return strings.Contains(agent, word) })
}

// isRobots reports whether a crawler asks what it may crawl.
func isRobots(r *http.Request) bool {
	return r.URL.Path == "/robots.txt" && (r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// robots is the robots.txt of a sandbox that is not running.
const robots = "User-agent: *\nDisallow: /\n"

func writeRobots(w http.ResponseWriter) {
	writeOwn(w, "text/plain; charset=utf-8", http.StatusOK, []byte(robots))
}
