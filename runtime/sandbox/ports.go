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
		b.emit(Event{Type: EventPortUnexposed, Port: port})
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
	return cmp.Or(
		fillMode("access", &p.Access, AccessToken, AccessPublic),
		fillMode("wake", &p.Wake, WakeNavigation, WakeAny, WakeNever),
		fillMode("host", &p.Host, HostAuto, HostRewrite, HostPreserve),
		fillMode("protocol", &p.Protocol, ProtocolAuto, ProtocolHTTP1, ProtocolH2C),
		fillMode("websocket", &p.WebSocket, WebSocketSleep, WebSocketKeepAwake),
	)
}

// fillMode sets an empty mode to the first of those that are valid, and refuses others.
func fillMode[M ~string](field string, mode *M, valid ...M) error {
	*mode = cmp.Or(*mode, valid[0])
	if slices.Contains(valid, *mode) {
		return nil
	}
	var names []string
	for _, v := range valid {
		names = append(names, string(v))
	}
	return &InvalidError{Field: field, Reason: fmt.Sprintf("%q is not a valid mode", clip(string(*mode))), Want: "use " + strings.Join(names, " or ")}
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
