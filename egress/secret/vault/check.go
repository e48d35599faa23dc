package vault

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/problem"
)

// Limits. Put refuses secrets beyond them.
const (
	// MaxSecrets of an owner.
	MaxSecrets = 1000
	// MinValue bytes of a value: responses are searched for it, and a short one, which
	// is in them by chance, would be blotted out everywhere.
	MinValue = 8
	// MaxValue holds a private key with a chain of certificates.
	MaxValue = 64 << 10
	// MaxHosts of a secret.
	MaxHosts = 100
	// maxOwner leaves space for the secret's name in the document's name.
	maxOwner = 128
)

var namePattern = regexp.MustCompile(`\A[a-z0-9_-]{1,64}\z`)

// check checks a secret, and returns the patterns of its hosts.
func check(owner, name string, value []byte, hosts []string) ([]pattern, error) {
	if owner == "" || len(owner) > maxOwner {
		return nil, fmt.Errorf("an owner has 1 to %d bytes, this one has %d", maxOwner, len(owner))
	}
	if !namePattern.MatchString(name) {
		return nil, &problem.InvalidError{Field: "name", Reason: fmt.Sprintf("invalid name %.80q", name), Want: "use 1 to 64 of a-z, 0-9, - and _"}
	}
	switch n := len(value); {
	case n < MinValue:
		return nil, &problem.InvalidError{Field: "value", Reason: fmt.Sprintf("%d bytes; a value so short cannot be found in responses without matching other text", n),
			Want: fmt.Sprintf("use at least %d", MinValue)}
	case n > MaxValue:
		return nil, &problem.InvalidError{Field: "value", Reason: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("use at most %d", MaxValue)}
	}
	patterns, err := parsePatterns(hosts)
	if err != nil {
		return nil, err
	}
	for i, h := range patterns {
		if h.below && open(h.name) {
			return nil, &problem.InvalidError{Field: "hosts", Reason: fmt.Sprintf("%s: anyone can register a name below %s", h, h.name), Want: "name the hosts that need it"}
		}
		if slices.Contains(patterns[:i], h) {
			return nil, &problem.InvalidError{Field: "hosts", Reason: fmt.Sprintf("duplicate host %s", h), Want: "name it once"}
		}
	}
	return patterns, nil
}

// parsePatterns reads hosts, stored ones too.
func parsePatterns(hosts []string) ([]pattern, error) {
	if n := len(hosts); n == 0 || n > MaxHosts {
		return nil, &problem.InvalidError{Field: "hosts", Reason: fmt.Sprintf("%d hosts", n),
			Want: fmt.Sprintf("name 1 to %d hosts that the secret may be sent to, such as api.github.com", MaxHosts)}
	}
	patterns := make([]pattern, 0, len(hosts))
	for i, h := range hosts {
		field := fmt.Sprintf("hosts[%d]", i)
		if h == "**" || h == "*" {
			return nil, &problem.InvalidError{Field: field, Reason: "a secret is bound to hosts, not to all of them", Want: "name those that need it, such as api.github.com"}
		}
		if strings.HasPrefix(h, preset.Prefix) {
			return nil, &problem.InvalidError{Field: field, Reason: "a secret is bound to hosts, not to a preset: an update of doze or the operator may add hosts to those",
				Want: "name those that need it, such as api.github.com; `doze egress presets` lists them"}
		}
		name, below, err := rule.CleanPattern(h)
		if err != nil {
			return nil, &problem.InvalidError{Field: field, Reason: err.Error(), Want: "use names such as api.github.com, and *.example.com for all below"}
		}
		patterns = append(patterns, pattern{name, below})
	}
	return patterns, nil
}

// open reports whether names below it are given to strangers, as below com, co.uk or
// github.io. A single label that is not a known domain belongs to a private network.
func open(name string) bool {
	suffix, icann := publicsuffix.PublicSuffix(name)
	return suffix == name && (icann || strings.Contains(suffix, "."))
}

// pattern is a host name, or all below one.
type pattern struct {
	name  string
	below bool
}

func (p pattern) String() string {
	if p.below {
		return "*." + p.name
	}
	return p.name
}

func (p pattern) match(host string) bool {
	if !p.below {
		return host == p.name
	}
	rest, ok := strings.CutSuffix(host, p.name)
	return ok && len(rest) > 1 && rest[len(rest)-1] == '.'
}
