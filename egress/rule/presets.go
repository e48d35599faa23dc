package rule

import (
	"fmt"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/rule/preset"
)

// Limits of the operator's presets. More is an error of NewPresets.
const (
	MaxPresets     = 100
	MaxPresetHosts = 200 // of each
)

// Presets are the lists of hosts that rules can name: those that come with doze, and the
// operator's. They do not change. nil has those that come with doze.
type Presets struct {
	list     []preset.Preset // in the order of their names
	compiled []*Hosts        // of each
}

var builtInPresets = func() *Presets {
	p, err := NewPresets(nil)
	if err != nil {
		panic(err) // TestPresetsAreListsOfHosts
	}
	return p
}()

// NewPresets adds the operator's presets to those that come with doze. One of the same
// name replaces doze's preset. Their Source is set.
func NewPresets(operators []preset.Preset) (*Presets, error) {
	if len(operators) > MaxPresets {
		return nil, fmt.Errorf("%d presets; at most %d are supported", len(operators), MaxPresets)
	}
	p := &Presets{list: preset.All()}
	for _, o := range operators {
		i, found := p.find(o.Name)
		switch {
		case !namePattern.MatchString(o.Name):
			return nil, fmt.Errorf("preset %.80q: a name is 1 to 64 of a-z, 0-9, - and _", o.Name)
		case found && p.list[i].Source == preset.Node:
			return nil, fmt.Errorf("preset %s is already set", o.Name)
		case len(o.Description) > MaxText:
			return nil, fmt.Errorf("preset %s: description has %d bytes; at most %d are supported", o.Name, len(o.Description), MaxText)
		case len(o.Hosts) == 0:
			return nil, fmt.Errorf("preset %s has no hosts", o.Name)
		case len(o.Hosts) > MaxPresetHosts:
			return nil, fmt.Errorf("preset %s has %d hosts; at most %d are supported", o.Name, len(o.Hosts), MaxPresetHosts)
		case !found:
			p.list = slices.Insert(p.list, i, preset.Preset{})
		}
		o.Source = preset.Node
		p.list[i] = o
	}
	p.compiled = make([]*Hosts, len(p.list))
	for i, one := range p.list {
		p.compiled[i] = new(Hosts)
		for j, host := range one.Hosts {
			if host == "**" || strings.HasPrefix(host, preset.Prefix) {
				return nil, fmt.Errorf("preset %s: hosts[%d]: %.80q cannot be in a preset; use a name, or `*.` and a name", one.Name, j, host)
			}
			if slices.Contains(one.Hosts[:j], host) {
				return nil, fmt.Errorf("preset %s: hosts[%d]: %.80q is already in the list", one.Name, j, host)
			}
			if err := p.compiled[i].addName(host); err != nil {
				return nil, fmt.Errorf("preset %s: hosts[%d]: %w", one.Name, j, err)
			}
		}
	}
	return p, nil
}

// All returns the presets in the order of their names. The caller does not change them.
func (p *Presets) All() []preset.Preset { return p.orBuiltIn().list }

func (p *Presets) orBuiltIn() *Presets {
	if p == nil {
		return builtInPresets
	}
	return p
}

func (p *Presets) find(name string) (int, bool) {
	return slices.BinarySearchFunc(p.list, name, func(p preset.Preset, name string) int { return strings.Compare(p.Name, name) })
}

// maxPresetNames that an error lists.
const maxPresetNames = 40

// lookup returns the hosts of a preset. The error names those that there are.
func (p *Presets) lookup(name string) (*Hosts, error) {
	p = p.orBuiltIn()
	i, found := p.find(name)
	if found {
		return p.compiled[i], nil
	}
	names := make([]string, 0, maxPresetNames+1)
	for _, one := range p.list[:min(len(p.list), maxPresetNames)] {
		names = append(names, one.Name)
	}
	if len(p.list) > maxPresetNames {
		names = append(names, "…")
	}
	return nil, fmt.Errorf("%.80q is not a preset; use one of %s", name, strings.Join(names, ", "))
}
