package rule

import (
	"fmt"
	"strconv"
	"strings"
)

// Ports is a range of TCP ports, both ends included. Its text is 443 or 8000-8100.
type Ports struct{ First, Last uint16 }

// ParsePorts is the reverse of Ports.String.
func ParsePorts(s string) (Ports, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, err := strconv.ParseUint(first, 10, 16)
	b, errLast := strconv.ParseUint(last, 10, 16)
	if err != nil || errLast != nil || a == 0 || a > b {
		return Ports{}, fmt.Errorf("invalid port %.40q: write 443 or 8000-8100, of 1 to 65535", s)
	}
	return Ports{uint16(a), uint16(b)}, nil
}

func (p Ports) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// MarshalText implements encoding.TextMarshaler.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Ports) UnmarshalText(b []byte) (err error) {
	*p, err = ParsePorts(string(b))
	return err
}
