package registry

import (
	"fmt"
	"net/netip"
	"strings"

	"oras.land/oras-go/v2/registry"
)

// dockerHub is the name of Docker Hub in references. Its API has another host.
const dockerHub = "docker.io"

// Reference names an image in a registry.
type Reference struct {
	Registry   string // the host, and the port if it is not the default
	Repository string // such as team/shop
	Tag        string
}

// ParseReference parses REGISTRY/REPOSITORY[:TAG]. The default of TAG is latest. The errors name what
// is wrong and what is right.
func ParseReference(text string) (Reference, error) {
	if scheme, rest, ok := strings.Cut(text, "://"); ok {
		return Reference{}, fmt.Errorf("%q begins with a scheme; omit %s://, as in %s", text, scheme, rest)
	}
	host, path, ok := strings.Cut(text, "/")
	if !ok || !strings.ContainsAny(host, ".:") && host != "localhost" {
		return Reference{}, fmt.Errorf("%q does not begin with a registry; use registry.example.com/%[1]s or, on Docker Hub, %s/USER/%[3]s",
			text, dockerHub, text[strings.LastIndex(text, "/")+1:])
	}
	r := Reference{Registry: host}
	if r.Repository, _, ok = strings.Cut(path, "@"); ok {
		return Reference{}, fmt.Errorf("%q has a digest, which a push computes; use a tag, as in %s/%s:latest", text, host, strings.SplitN(r.Repository, ":", 2)[0])
	}
	r.Repository, r.Tag, ok = strings.Cut(path, ":")
	if !ok {
		r.Tag = "latest"
	}
	if host == dockerHub && !strings.Contains(r.Repository, "/") {
		r.Repository = "library/" + r.Repository
	}
	oras := r.oras()
	switch {
	case oras.ValidateRegistry() != nil:
		return r, fmt.Errorf("%q is not the host of a registry; use registry.example.com or registry.example.com:5000", host)
	case r.Repository == "":
		return r, fmt.Errorf("%q has no repository; use %s/shop:1, for example", text, host)
	case r.Repository != strings.ToLower(r.Repository):
		return r, fmt.Errorf("repository %q has capitals; use %q", r.Repository, strings.ToLower(r.Repository))
	case oras.ValidateRepository() != nil:
		return r, fmt.Errorf("%q is not a repository; use lower-case letters and digits, separated by . _ - and /, such as team/shop", r.Repository)
	case oras.ValidateReferenceAsTag() != nil:
		return r, fmt.Errorf("%q is not a tag; use up to 128 letters, digits, dots, dashes and underscores", r.Tag)
	}
	return r, nil
}

// oras returns the reference for the library.
func (r Reference) oras() registry.Reference {
	return registry.Reference{Registry: r.Registry, Repository: r.Repository, Reference: r.Tag}
}

// host returns the host of the registry's API.
func (r Reference) host() string { return r.oras().Host() }

// isLoopback reports whether the registry has a loopback address.
func (r Reference) isLoopback() bool {
	host := hostname(r.Registry)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// hostname returns a host without its port, and an IPv6 address without its brackets.
func hostname(hostport string) string {
	if i := strings.LastIndex(hostport, ":"); i > strings.LastIndex(hostport, "]") {
		hostport = hostport[:i]
	}
	return strings.Trim(hostport, "[]")
}
