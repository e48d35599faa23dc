package egress

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"time"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
)

// Settings are what the operator says. They can change while the node runs.
type Settings struct {
	// Default is what becomes of what no rule matches.
	Default rule.Default
	// Rules of the node.
	Rules []rule.Rule
	// Presets that all rules can name; nil for those that come with doze.
	Presets *rule.Presets
	// Resolve says where hosts are, instead of DNS: names, or `*.` and a name.
	Resolve map[string]dial.Override
	// NameServers are asked for the addresses of all other hosts; the system's if
	// there are none.
	NameServers []netip.AddrPort
	// UpstreamCAs (PEM) are trusted besides the system's when servers are dialled.
	UpstreamCAs []byte
	// UpstreamProxy is an HTTP proxy through which servers are dialled, or nil.
	UpstreamProxy *url.URL
	// AllowECH lets connections pass through that may hide their server's name,
	// instead of intercepting them.
	AllowECH bool
	// MaxConnections bounds the connections of all sandboxes and of the proxy,
	// MaxSandboxConnections those of one sandbox, or of one owner at the proxy.
	MaxConnections, MaxSandboxConnections int
	// PolicyMemory bounds an instance of a policy, in bytes, and PolicyTime what
	// it may compute for one request or response. Changes apply from the next Open
	// on.
	PolicyMemory int64
	PolicyTime   time.Duration
}

// DefaultSettings are those of a node whose operator says nothing.
func DefaultSettings() Settings {
	return Settings{
		Default:               rule.AllowPublic,
		MaxConnections:        16384,
		MaxSandboxConnections: 1024,
		PolicyMemory:          16 << 20,
		PolicyTime:            50 * time.Millisecond,
	}
}

// Validate checks what the types leave open, but for Rules, which are compiled.
func (s *Settings) Validate() error {
	switch {
	case s.Default != rule.AllowPublic && s.Default != rule.DenyAll:
		return fmt.Errorf("egress: default is %q; write %s or %s", s.Default, rule.AllowPublic, rule.DenyAll)
	case s.MaxConnections < 1 || s.MaxSandboxConnections < 1:
		return errors.New("egress: the limits of connections are whole numbers from 1")
	case s.PolicyMemory < 1<<20 || s.PolicyMemory > 1<<30:
		return fmt.Errorf("egress: policy_memory_limit is %d bytes; write 1MiB to 1GiB", s.PolicyMemory)
	case s.PolicyTime < time.Millisecond || s.PolicyTime > time.Minute:
		return fmt.Errorf("egress: policy_time_limit is %v; write 1ms to 1m", s.PolicyTime)
	}
	c := dial.Config{Servers: s.NameServers, Overrides: s.Resolve, Proxy: s.UpstreamProxy}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	return nil
}

// errNoCertificate is of a file that was given as one with certificates.
var errNoCertificate = errors.New("egress: upstream_ca: there is no certificate in PEM in it")

// rootsWith returns the system's certificates and those in pem, or nil for the system's
// alone.
func rootsWith(pem []byte) (*x509.CertPool, error) {
	if len(pem) == 0 {
		return nil, nil
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errNoCertificate
	}
	return roots, nil
}
