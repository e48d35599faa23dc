package helper

import "slices"

// maxNamespaces bounds the open namespaces, with two descriptors each: well below the 1,024
// descriptors that a process may have by default. With more sandboxes, a connection to one
// whose namespace is not open takes some 30 µs longer.
const maxNamespaces = 256

type namespaceKey struct {
	id  string
	pid uint32
}

// cache has the most recently used namespaces, and closes those that it evicts.
type cache struct {
	max     int
	entries []entry // the least recently used first
}

type entry struct {
	key       namespaceKey
	namespace *namespace
}

func (c *cache) get(key namespaceKey) *namespace {
	for i, e := range slices.Backward(c.entries) {
		if e.key == key {
			c.entries = append(slices.Delete(c.entries, i, i+1), e)
			return e.namespace
		}
	}
	return nil
}

// put adds a namespace under a new key. The cache owns it.
func (c *cache) put(key namespaceKey, n *namespace) {
	if len(c.entries) == c.max {
		c.entries[0].namespace.close()
		c.entries = slices.Delete(c.entries, 0, 1)
	}
	c.entries = append(c.entries, entry{key, n})
}

// forget closes the namespaces of a sandbox, for every pid.
func (c *cache) forget(id string) {
	c.entries = slices.DeleteFunc(c.entries, func(e entry) bool {
		if e.key.id == id {
			e.namespace.close()
		}
		return e.key.id == id
	})
}
