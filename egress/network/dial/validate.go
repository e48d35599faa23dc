package dial

import (
	"errors"
	"fmt"
	"strings"

	"github.com/doze-run/doze/egress/network/address"
	"github.com/doze-run/doze/egress/rule"
)

// Validate returns an error that names each invalid setting of a Config and its remedy.
func (c *Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	for _, s := range c.Servers {
		if !s.IsValid() || s.Port() == 0 {
			bad("name server %s: write an address with a port, such as 192.0.2.53:53", s)
		}
	}
	for pattern, o := range c.Overrides {
		if err := ValidateOverride(pattern, o); err != nil {
			problems = append(problems, err)
		}
	}
	if u := c.Proxy; u != nil {
		if u.Scheme != "http" && u.Scheme != "https" {
			bad("upstream proxy: %.20q: its URL begins with http:// or https://", u.Scheme)
		}
		if u.Hostname() == "" || u.Port() == "0" {
			bad("upstream proxy: its URL names no host, or no port that can be reached")
		}
		if strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
			bad("upstream proxy: its URL ends after the host and the port")
		}
	}
	return errors.Join(problems...)
}

// ValidateOverride checks one entry of Config.Overrides.
func ValidateOverride(pattern string, o Override) error {
	name := strings.TrimPrefix(pattern, "*.")
	if clean, err := rule.CleanHost(name); err != nil || clean != name {
		return fmt.Errorf("%.80q: write a name, such as git.corp or *.corp, in lower case", pattern)
	}
	if len(o.Addrs) == 0 {
		return fmt.Errorf("%s: has no address", pattern)
	}
	for _, a := range o.Addrs {
		if a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("%s: %s: write an IPv4 address as such, and no zone", pattern, a)
		}
		class := address.Classify(a)
		if _, known := need[class]; !known {
			return fmt.Errorf("%s: %s (%s) is not an address of a host", pattern, a, class)
		}
	}
	return nil
}
