package caddymodule

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
)

// Egress is the configuration of the sandboxes' egress.
type Egress struct {
	// The action for connections that no rule matches: `allow_public` lets them
	// through to public addresses, `deny` refuses them. Default: `allow_public`.
	Default rule.Default `json:"default,omitempty"`
	// The node's rules. They precede the rules of owners and of sandboxes, which
	// cannot allow a destination that one of these denies.
	Rules []types.Rule `json:"rules,omitempty"`
	// Lists of hosts that the rules of the node, of owners and of sandboxes can name:
	// `preset:npm` for the one that is called `npm` here. One with the name of a preset
	// that comes with doze replaces it. At most 100.
	Presets map[string]Preset `json:"presets,omitempty"`
	// Addresses of hosts, which override DNS: names, or patterns
	// such as `*.corp.example`. They may be private, and may have a port, to which
	// connections to the host then go whatever port they ask for.
	Resolve map[string][]string `json:"resolve,omitempty"`
	// DNS servers that resolve the names of hosts: addresses, with a port unless it
	// is 53. The first is used until it does not answer, then the next. Default: the
	// system's.
	Resolvers []string `json:"resolvers,omitempty"`
	// Files with certificates (PEM) of authorities that are trusted for upstream
	// servers in addition to the system's.
	UpstreamCAFiles []string `json:"upstream_ca_files,omitempty"`
	// The URL of an HTTP proxy (CONNECT) through which upstream servers are
	// reached. Default: none.
	UpstreamProxy string `json:"upstream_proxy,omitempty"`
	// The action for TLS connections that are not intercepted otherwise and may
	// hide their server's name (Encrypted Client Hello, whose extension browsers
	// always send): `intercept`, or `allow` to pass them through. Default:
	// `intercept`.
	ECH string `json:"ech,omitempty"`
	// How many connections all sandboxes have at most. Default: 16384.
	MaxConnections int `json:"max_connections,omitempty"`
	// How many connections one sandbox has at most. Default: 1024.
	MaxConnectionsPerSandbox int `json:"max_connections_per_sandbox,omitempty"`
	// How much memory an instance of a policy has at most, in bytes. Default: 16 MiB.
	PolicyMemoryLimit int64 `json:"policy_memory_limit,omitempty"`
	// How long a policy may compute at most for one request or response.
	// Default: 50ms.
	PolicyTimeLimit caddy.Duration `json:"policy_time_limit,omitempty"`
}

// Preset is a named list of hosts.
type Preset struct {
	// The purpose, which owners read in the list of presets.
	Description string `json:"description,omitempty"`
	// Names, or `*.` and a name for all below it. 1 to 200.
	Hosts []string `json:"hosts"`
}

// presets returns the operator's presets and the ones that come with doze.
func (e *Egress) presets() (*rule.Presets, error) {
	var list []preset.Preset
	for _, name := range slices.Sorted(maps.Keys(e.Presets)) {
		p := e.Presets[name]
		list = append(list, preset.Preset{Name: name, Description: p.Description, Hosts: p.Hosts})
	}
	return rule.NewPresets(list)
}

// settings checks all that can be checked without the node.
func (e *Egress) settings() (egress.Settings, error) {
	s, err := e.settingsWithoutFiles()
	if err != nil || e == nil {
		return s, err
	}
	for _, path := range e.UpstreamCAFiles {
		pem, err := os.ReadFile(path)
		if err != nil {
			return s, fmt.Errorf("egress: upstream_ca: %w", err)
		}
		s.UpstreamCAs = append(append(s.UpstreamCAs, pem...), '\n')
	}
	return s, nil
}

// settingsWithoutFiles are the settings without what is in files, which may be on another machine.
func (e *Egress) settingsWithoutFiles() (egress.Settings, error) {
	s := egress.DefaultSettings()
	if e == nil {
		return s, nil
	}
	set(&s.Default, e.Default)
	if s.Default != rule.AllowPublic && s.Default != rule.DenyAll {
		return s, fmt.Errorf("egress: default is %q; write %s or %s", e.Default, rule.AllowPublic, rule.DenyAll)
	}
	var err error
	if s.Presets, err = e.presets(); err != nil {
		return s, fmt.Errorf("egress: %w", err)
	}
	if s.Rules, err = compiledRules(e.Rules, s.Presets); err != nil {
		return s, fmt.Errorf("egress: %w", err)
	}
	switch e.ECH {
	case "", "intercept":
	case "allow":
		s.AllowECH = true
	default:
		return s, fmt.Errorf("egress: ech is %q; write intercept or allow", e.ECH)
	}
	set(&s.MaxConnections, e.MaxConnections)
	set(&s.MaxSandboxConnections, e.MaxConnectionsPerSandbox)
	set(&s.PolicyMemory, e.PolicyMemoryLimit)
	set(&s.PolicyTime, time.Duration(e.PolicyTimeLimit))
	if s.Resolve, err = overrides(e.Resolve); err != nil {
		return s, err
	}
	if s.NameServers, err = resolvers(e.Resolvers); err != nil {
		return s, err
	}
	if s.UpstreamProxy, err = proxyURL(e.UpstreamProxy); err != nil {
		return s, err
	}
	return s, s.Validate()
}

// compiledRules converts rules and checks them as a layer of the node.
func compiledRules(rules []types.Rule, presets *rule.Presets) ([]rule.Rule, error) {
	converted, err := api.RulesOf(rules)
	if err != nil {
		return nil, err
	}
	if _, err := rule.Compile(rule.Node, converted, presets); err != nil {
		return nil, err
	}
	return converted, nil
}

// overrides parses addresses with or without a port.
func overrides(resolve map[string][]string) (map[string]dial.Override, error) {
	parsed := make(map[string]dial.Override, len(resolve))
	for host, texts := range resolve {
		var o dial.Override
		for i, text := range texts {
			a, err := addrPort(text)
			if err != nil {
				return nil, fmt.Errorf("egress: resolve %s: invalid address %q; write it like 10.1.2.3 or 10.1.2.3:8443", host, text)
			}
			if i > 0 && a.Port() != o.Port {
				return nil, fmt.Errorf("egress: resolve %s: all addresses have the same port, or none", host)
			}
			o.Addrs, o.Port = append(o.Addrs, a.Addr()), a.Port()
		}
		parsed[host] = o
	}
	return parsed, nil
}

// dnsPort of name servers (RFC 1035).
const dnsPort = 53

func resolvers(texts []string) ([]netip.AddrPort, error) {
	var servers []netip.AddrPort
	for _, text := range texts {
		a, err := addrPort(text)
		if err != nil {
			return nil, fmt.Errorf("egress: resolvers: invalid address %q; write it like 10.1.2.3 or 10.1.2.3:5353", text)
		}
		if a.Port() == 0 {
			a = netip.AddrPortFrom(a.Addr(), dnsPort)
		}
		servers = append(servers, a)
	}
	return servers, nil
}

func addrPort(text string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	return netip.ParseAddrPort(text)
}

func proxyURL(text string) (*url.URL, error) {
	if text == "" {
		return nil, nil
	}
	u, err := url.Parse(text)
	if err == nil && (u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
		err = errors.New("no host, or neither http nor https")
	}
	if err != nil {
		// The URL may hold a password, so it is not repeated.
		return nil, errors.New("egress: upstream_proxy: invalid URL; write it like http://proxy.example:3128")
	}
	return u, nil
}
