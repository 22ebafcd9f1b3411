package routing

// mix is the finaliser of splitmix64: a bijection whose output bits depend on all input bits.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xBF58476D1CE4E5B9
	x ^= x >> 27
	x *= 0x94D049BB133111EB
	return x ^ x>>31
}

// hashString hashes s under a seed. It is the same on every machine and in every process, so that replicas with the
// same Config.HashSeed break ties alike. It does not resist chosen texts.
func hashString(seed uint64, s string) uint64 {
	h := seed ^ 0xCBF29CE484222325
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 0x100000001B3
	}
	return mix(h ^ uint64(len(s)))
}
