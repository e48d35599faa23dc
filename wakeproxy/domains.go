package wakeproxy

import (
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/doze-run/doze/runtime/sandbox"
)

// maxDomain leaves room for the label of a preview (RFC 1035: 253 in all, and 63
// for a label with its dot).
const maxDomain = 253 - 64

var domainLabel = regexp.MustCompile(`\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\z`)

// ValidateDomain checks that a domain in lower case can be in URLs and certificates of
// previews.
func ValidateDomain(domain string) error {
	if len(domain) > maxDomain {
		return fmt.Errorf("%.80q… is too long; use at most %d characters", domain, maxDomain)
	}
	if domain == "localhost" || net.ParseIP(domain) != nil {
		return fmt.Errorf("%q has no subdomains; use a domain such as preview.example.com", domain)
	}
	for label := range strings.SplitSeq(domain, ".") {
		if !domainLabel.MatchString(label) {
			return fmt.Errorf("%q is not a domain name; use labels of a-z, 0-9 and -, such as preview.example.com (other alphabets as xn--…)", domain)
		}
	}
	return nil
}

// Domains are those under which previews live, in lower case.
type Domains []string

// Contains reports whether a host belongs to previews, existing or not.
func (d Domains) Contains(host string) bool {
	host = canonicalHost(hostname(host))
	return slices.ContainsFunc(d, func(domain string) bool {
		return host == domain || strings.HasSuffix(host, "."+domain)
	})
}

// URL returns the address of an exposed port under a domain whose previews visitors
// reach on publicPort.
func URL(domain string, publicPort int, sb sandbox.Sandbox, port sandbox.Port) string {
	name := Name{Port: port.Port, ID: sb.ID}
	if port.Access != sandbox.AccessPublic {
		name.Token = port.Token
	}
	host := name.Host(domain)
	if publicPort != 443 {
		host += ":" + strconv.Itoa(publicPort)
	}
	return "https://" + host + "/"
}
