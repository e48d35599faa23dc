package wakeproxy

import (
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// names are the two names of one server: the visitor's and its own. A server
// compares the places of a request that contain its address, so all of them change
// together; docs/RATIONALE.md has the reasons.
type names struct {
	origin string // of the preview as the visitor's browser writes it
	query  string // of the request, decoded: URLs in it are the visitor's words
	port   uint16 // of the server
	// rewrite presents the server as http://localhost:PORT. Otherwise it sees the
	// preview's own origin.
	rewrite bool
}

func namesOf(r *http.Request, trusted bool, port uint16) names {
	query, err := url.QueryUnescape(r.URL.RawQuery)
	if err != nil {
		query = r.URL.RawQuery
	}
	return names{origin: originOf(r, trusted), query: query, port: port}
}

// originOf returns the origin of a preview as a browser writes it, in lower case and
// without a trailing dot. A trusted proxy knows its scheme and its port.
func originOf(r *http.Request, trusted bool) string {
	scheme, host := "http", canonicalHost(r.Host)
	if r.TLS != nil {
		scheme = "https"
	}
	if trusted {
		if proto := r.Header.Get("X-Forwarded-Proto"); proto == "http" || proto == "https" {
			scheme = proto
		}
		if public := canonicalHost(r.Header.Get("X-Forwarded-Host")); hostname(public) == hostname(host) {
			host = public
		}
	}
	defaultPort := map[string]string{"http": ":80", "https": ":443"}[scheme]
	return scheme + "://" + strings.TrimSuffix(host, defaultPort)
}

// canonicalHost returns a Host header in lower case and without a trailing dot.
func canonicalHost(host string) string {
	name, port := hostname(host), ""
	if len(name) < len(host) {
		port = host[len(name):]
	}
	return lowerASCII(strings.TrimSuffix(name, ".") + port)
}

// hostname returns host without its port. Previews have names, not addresses.
func hostname(host string) string {
	name, _, _ := strings.Cut(host, ":")
	return name
}

// host returns the preview's Host header.
func (n names) host() string {
	_, host, _ := strings.Cut(n.origin, "://")
	return host
}

func (n names) serverHost() string { return "localhost:" + strconv.Itoa(int(n.port)) }

// forwardedOrigin are the headers in which proxies name the address that a
// visitor asked for.
var forwardedOrigin = []string{
	"Forwarded", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto", "X-Forwarded-Protocol", "X-Forwarded-Scheme",
	"X-Forwarded-Server", "X-Forwarded-Ssl", "X-Original-Host", "X-Scheme", "X-Url-Scheme", "Front-End-Https",
}

// toServer makes the host and the headers of a request agree on the server's
// address. An Origin or a Referer of another site is not changed.
func (n names) toServer(header http.Header) (host string) {
	own := n.origin
	host = n.host()
	if n.rewrite {
		host, own = n.serverHost(), "http://"+n.serverHost()
		for _, name := range forwardedOrigin {
			delete(header, name)
		}
	}
	for _, name := range []string{"Origin", "Referer"} {
		value := header.Get(name)
		scheme, rest, ok := strings.Cut(value, "://")
		if !ok {
			continue
		}
		end := endOfAuthority(rest)
		if scheme+"://"+canonicalHost(rest[:end]) == n.origin {
			header.Set(name, own+rest[end:])
		}
	}
	return host
}

func endOfAuthority(s string) int {
	if i := strings.IndexAny(s, "/?#"); i >= 0 {
		return i
	}
	return len(s)
}

var (
	linkTarget = regexp.MustCompile(`<[^<>]*>`)
	listItem   = regexp.MustCompile(`[^\s;,]+`)
	refreshURL = regexp.MustCompile(`(?i)^(\s*\d*\s*[;,]\s*url\s*=\s*["']?)(.*)$`)
)

// toVisitor makes the URLs of the server in a response's header the preview's.
func (n names) toVisitor(header http.Header) {
	each := func(name string, change func(string) string) {
		values := header[name]
		for i, value := range values {
			if strings.Contains(value, "//") {
				values[i] = change(value)
			}
		}
	}
	each("Location", n.toVisitorLocation)
	each("Content-Location", n.toVisitorURL)
	each("Access-Control-Allow-Origin", n.toVisitorURL)
	each("Link", func(value string) string {
		return linkTarget.ReplaceAllStringFunc(value, func(target string) string {
			return "<" + n.toVisitorURL(target[1:len(target)-1]) + ">"
		})
	})
	each("Refresh", func(value string) string {
		parts := refreshURL.FindStringSubmatch(value)
		if parts == nil {
			return value
		}
		return parts[1] + n.toVisitorURL(parts[2])
	})
	for _, name := range []string{"Content-Security-Policy", "Content-Security-Policy-Report-Only"} {
		each(name, func(value string) string { return listItem.ReplaceAllStringFunc(value, n.toVisitorURL) })
	}
}

// toVisitorLocation is toVisitorURL for a redirect. The address to which a server of
// another site is to send the visitor back becomes the preview's, too.
func (n names) toVisitorLocation(location string) string {
	if changed := n.toVisitorURL(location); changed != location {
		return changed
	}
	target, query, ok := strings.Cut(location, "?")
	if !ok {
		return location
	}
	query, fragment, hasFragment := strings.Cut(query, "#")
	pairs := strings.Split(query, "&")
	for i, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		if name != "redirect_uri" && name != "post_logout_redirect_uri" {
			continue
		}
		if back, err := url.QueryUnescape(value); err == nil {
			if changed := n.toVisitorURL(back); changed != back {
				pairs[i] = name + "=" + url.QueryEscape(changed)
			}
		}
	}
	location = target + "?" + strings.Join(pairs, "&")
	if hasFragment {
		location += "#" + fragment
	}
	return location
}

// toVisitorURL turns an absolute URL of the server into one of the preview, and
// returns any other unchanged.
func (n names) toVisitorURL(location string) string {
	scheme, rest, ok := strings.Cut(location, "//")
	scheme = lowerASCII(scheme)
	origin := n.origin
	switch {
	case !ok:
		return location
	case scheme == "ws:", scheme == "wss:":
		origin = "ws" + strings.TrimPrefix(n.origin, "http")
	case scheme != "" && scheme != "http:" && scheme != "https:":
		return location
	}
	end := endOfAuthority(rest)
	if !n.own(scheme, rest[:end]) {
		return location
	}
	return origin + rest[end:]
}

// own reports whether a URL with the scheme and authority is the server's.
func (n names) own(scheme, authority string) bool {
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		host, port = strings.Trim(authority, "[]"), ""
	}
	own := port == strconv.Itoa(int(n.port))
	switch host = strings.TrimSuffix(lowerASCII(host), "."); host {
	case "localhost", "127.0.0.1", "::1", "0.0.0.0":
		if n.rewrite {
			return own || port == "" // the visitor's own machine is never meant
		}
		// The server knows the preview's name: either its configuration is about
		// localhost, or it repeats what a client of its asked for, such as the
		// address that an OAuth client of another sandbox has there.
		return own && scheme != "https:" && scheme != "wss:" && !strings.Contains(n.query, "//"+authority)
	case hostname(n.host()):
		return true // with the scheme and the port that the visitor knows
	}
	return false
}
