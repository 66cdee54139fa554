// What a recorded step is given: the token, and by how much its counters have moved since it was recorded (counter.py).
extern "C" __global__ void set_inputs(int* ids, int token, int* moves, int m0, int m1, int m2, int m3, int m4, int m5, int m6,
                                      int m7, int m8, int m9, int m10, int m11, int m12, int m13, int m14)
{
    ids[0] = token;
    moves[0] = m0, moves[1] = m1, moves[2] = m2, moves[3] = m3, moves[4] = m4, moves[5] = m5, moves[6] = m6, moves[7] = m7;
    moves[8] = m8, moves[9] = m9, moves[10] = m10, moves[11] = m11, moves[12] = m12, moves[13] = m13, moves[14] = m14;
}
