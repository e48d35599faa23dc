package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Expose gives a port a preview, or changes the modes of one that has one.
// Empty modes mean the defaults. The port keeps its token and CreatedAt; one
// that was public gets a token.
func (m *Manager) Expose(ctx context.Context, id ID, p Port) (Port, error) {
	b, err := m.live(id)
	if err != nil {
		return Port{}, err
	}
	if err := p.fill(); err != nil {
		return Port{}, err
	}
	b.updating.Lock()
	defer b.updating.Unlock()
	before, existed := b.port(p.Port)
	if !existed && len(b.view.Load().Ports) >= maxPorts {
		return Port{}, &InvalidError{Field: "port", Reason: fmt.Sprintf("the sandbox has %d exposed ports", maxPorts), Want: "close one first"}
	}
	p.Token, p.CreatedAt = "", time.Now().UTC()
	if existed {
		p.Token, p.CreatedAt = before.Token, before.CreatedAt
	}
	switch {
	case p.Access == AccessPublic:
		p.Token = ""
	case p.Token == "":
		p.Token = newPortToken()
	}
	err = b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Ports = withPort(sb.Ports, p) },
		func(sb *Sandbox) {
			sb.Ports = withoutPort(sb.Ports, p.Port)
			if existed {
				sb.Ports = withPort(sb.Ports, before)
			}
		})
	if err != nil {
		return Port{}, err
	}
	if !existed {
		b.emit(Event{Type: EventPortExposed, Port: p.Port})
	}
	return p, nil
}

// Unexpose ends the preview of a port; its URL is never valid again.
func (m *Manager) Unexpose(ctx context.Context, id ID, port uint16) error {
	b, err := m.live(id)
	if err != nil {
		return err
	}
	b.updating.Lock()
	defer b.updating.Unlock()
	before, ok := b.port(port)
	if !ok {
		return fmt.Errorf("port %d of sandbox %s is not exposed: %w", port, b, ErrNotFound)
	}
	err = b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Ports = withoutPort(sb.Ports, port) },
		func(sb *Sandbox) { sb.Ports = withPort(sb.Ports, before) })
	if err == nil {
		b.emit(Event{Type: EventPortClosed, Port: port})
	}
	return err
}

// upgrade translates the modes of earlier versions.
func (p *Port) upgrade() {
	switch p.Wake {
	case "hold":
		p.Wake = WakeNavigation
	case "refuse":
		p.Wake = WakeNever
	}
	p.Protocol = cmp.Or(p.Protocol, ProtocolAuto)
}

// fill sets the defaults and refuses unknown modes.
func (p *Port) fill() error {
	if p.Port == 0 {
		return &InvalidError{Field: "port", Reason: "0 is not a valid port", Want: "use 1 to 65535"}
	}
	p.Access = cmp.Or(p.Access, AccessToken)
	p.Wake = cmp.Or(p.Wake, WakeNavigation)
	p.Host = cmp.Or(p.Host, HostAuto)
	p.Protocol = cmp.Or(p.Protocol, ProtocolAuto)
	p.WebSocket = cmp.Or(p.WebSocket, WebSocketSleep)
	for _, c := range []struct {
		field, value string
		modes        []string
	}{
		{"access", string(p.Access), []string{string(AccessToken), string(AccessPublic)}},
		{"wake", string(p.Wake), []string{string(WakeAny), string(WakeNavigation), string(WakeNever)}},
		{"host", string(p.Host), []string{string(HostAuto), string(HostRewrite), string(HostPreserve)}},
		{"protocol", string(p.Protocol), []string{string(ProtocolAuto), string(ProtocolHTTP1), string(ProtocolH2C)}},
		{"websocket", string(p.WebSocket), []string{string(WebSocketSleep), string(WebSocketKeepAwake)}},
	} {
		if !slices.Contains(c.modes, c.value) {
			return &InvalidError{Field: c.field, Reason: fmt.Sprintf("%q is not a valid mode", clip(c.value)), Want: "use " + strings.Join(c.modes, " or ")}
		}
	}
	return nil
}

func (b *liveSandbox) port(port uint16) (Port, bool) { return b.view.Load().Exposed(port) }

// Exposed returns the exposed port with that number.
func (sb *Sandbox) Exposed(port uint16) (Port, bool) {
	for _, p := range sb.Ports {
		if p.Port == port {
			return p, true
		}
	}
	return Port{}, false
}

func withPort(ports []Port, p Port) []Port {
	list := append(withoutPort(ports, p.Port), p)
	slices.SortFunc(list, func(a, b Port) int { return cmp.Compare(a.Port, b.Port) })
	return list
}

func withoutPort(ports []Port, port uint16) []Port {
	return slices.DeleteFunc(slices.Clone(ports), func(p Port) bool { return p.Port == port })
}
